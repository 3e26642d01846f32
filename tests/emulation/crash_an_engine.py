"""Run as a module by test_faulty_worker.py: an engine in a process of its own, as vLLM serves, that crashes at step 3.

Prints the tokens that the caller had got and the error that it got then; the process' log is on stderr.
"""

import os
import tempfile
from pathlib import Path

from tests.emulation.conftest import engine_config, write_tiny_llama
from tests.emulation.test_emulated_worker import FAST, add, prompt


def main() -> None:
    """Start, run into the crash, print, stop."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_PREFIX="EMULATED ",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        VLLM_LOGGING_LEVEL="INFO",
    )
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_llama(Path(directory))
        config = engine_config(model, {**FAST, "faults": [{"kind": "crash", "at_step": 3}]})
        # Only now: on a CPU vLLM would give the worker a second process, and import itself anew in both.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="fork")
        from vllm.v1.engine.exceptions import EngineDeadError
        from vllm.v1.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_vllm_config(config)
        add(engine, "one", prompt(40), max_tokens=9)
        num_tokens = 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    num_tokens = len(output.outputs[0].token_ids)
        except EngineDeadError as error:
            print(num_tokens, type(error).__name__)
        finally:
            engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
