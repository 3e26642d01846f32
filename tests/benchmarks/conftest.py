"""The scripts of benchmarks/ are no package: their folder is put where Python looks, as it is when one is run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
