"""A KV connector behind vLLM's public interface that loads what a test says is remote, and an engine to end loads."""

from typing import Any, ClassVar

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from tests.policies.scheduler_rig import Engine


class RemotePrefixes(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """The scheduler's side; there is no worker."""

    remote_tokens: ClassVar[dict[str, int]] = {}
    """Request id -> tokens of its prompt that are held elsewhere and are loaded asynchronously."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        more = max(self.remote_tokens.get(request.request_id, 0) - num_computed_tokens, 0)
        return more, more > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is kept of it."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


def kv_transfer_config() -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=RemotePrefixes.__name__, kv_connector_module_path=__name__, kv_role="kv_consumer"
    )


class LoadingEngine(Engine):
    """Reports what was put into `loaded` as loaded with the next step's outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded: set[str] = set()

    def _model_answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        answer = super()._model_answer(output)
        if self.loaded:
            answer.kv_connector_output = KVConnectorOutput(finished_recving=self.loaded)
            self.loaded = set()
        return answer
