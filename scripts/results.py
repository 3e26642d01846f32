"""Behind `scripts/results`: docs/results.md from the committed results of the experiments, or a check of it."""

import argparse
import sys
from collections.abc import Sequence
from difflib import unified_diff
from itertools import islice
from pathlib import Path

from results_page import page

ROOT = Path(__file__).resolve().parent.parent
SHOWN_DIFFERENCES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a file is wrong, or the page is not what would be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the directory of results.md and results/")
    arguments = parser.parse_args(argv)
    made = arguments.docs / "results.md"
    try:
        text = page(arguments.docs / "results")
    except (OSError, ValueError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 1
    if not arguments.check:
        made.write_text(text)
        return 0
    found = made.read_text() if made.exists() else ""
    if found == text:
        return 0
    print(f"results: {made} is not what would be made; run `scripts/results`", file=sys.stderr)
    differences = unified_diff(found.splitlines(), text.splitlines(), "found", "made", lineterm="", n=0)
    print("\n".join(islice(differences, SHOWN_DIFFERENCES)), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
