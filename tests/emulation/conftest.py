"""A model that is only its configuration, and vLLM engines in this process that run it on the emulated GPU."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 8_192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MakeEngine = Callable[..., Any]


def write_tiny_llama(directory: Path) -> Path:
    """Make a Hugging Face directory without weights and tokeniser; returns it."""
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return directory


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory without weights and tokeniser."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def make_engine(tiny_llama: Path) -> Iterator[MakeEngine]:
    """Start vLLM's engine in this process, or give the idle one that has the same arguments.

    Keyword arguments are vLLM's, beside `emulation` and `async_scheduling`.
    """
    engines: dict[str, Any] = {}

    def make(emulation: dict[str, Any], async_scheduling: bool = False, **engine_args: Any) -> Any:
        key = json.dumps([emulation, async_scheduling, engine_args])
        if key not in engines:
            engines[key] = _start(tiny_llama, emulation, async_scheduling, engine_args)
        assert not engines[key].has_unfinished_requests()
        return engines[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield make
    for engine in engines.values():
        engine.engine_core.shutdown()


def engine_config(model: Path, emulation: dict[str, Any], async_scheduling: bool = False, **engine_args: Any) -> Any:
    """vLLM's configuration of an engine on the emulated GPU."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        worker_cls="serve_app.emulation.worker.EmulatedGpuWorker",
        additional_config={"emulation": emulation},
        distributed_executor_backend="uni",
        enforce_eager=True,
        **{"block_size": 16, "max_model_len": 4_096, "max_num_batched_tokens": 64, **engine_args},
    )
    config = args.create_engine_config()
    # vLLM's CPU platform has just turned it off.
    config.scheduler_config.async_scheduling = async_scheduling
    return config


def _start(model: Path, emulation: dict[str, Any], async_scheduling: bool, engine_args: dict[str, Any]) -> Any:
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_vllm_config(engine_config(model, emulation, async_scheduling, **engine_args))
