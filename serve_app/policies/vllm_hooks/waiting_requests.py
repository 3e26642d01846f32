"""The waiting requests as rows of numbers, kept current from what vLLM's queue and block pool do between two steps."""

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from serve_app.policies.eviction import FreeBlocks
from serve_app.policies.request_table import RequestTable
from serve_app.policies.vllm_hooks.prefix_lookup import CachedPrefixes
from serve_app.policies.vllm_hooks.waiting_queue import OrderedWaitingQueue


class WaitingRequests:
    """Rows of those that wait, and of those whose prefill runs, as what passes them is still charged to them."""

    def __init__(self, manager: KVCacheManager, by_priority: bool) -> None:
        """`by_priority`: whether a request's priority counts (vLLM's priority policy)."""
        self.table: RequestTable[Request] = RequestTable()
        self.prefixes = CachedPrefixes(manager)
        self._by_priority = by_priority
        self._prefilling: dict[str, Request] = {}
        self._preempted: dict[str, Request] = {}
        self._pins: FreeBlocks | None = None
        self._pinned: dict[int, int] = {}
        """Row -> the block that is pinned for it."""

    def protect_in(self, pins: FreeBlocks | None) -> None:
        """Pin the deepest cached block of each waiting request in this free list from now on; None: in none."""
        for block in self._pinned.values():
            assert self._pins is not None
            self._pins.unpin(block)
        self._pinned.clear()
        self._pins = pins
        for row in self.table.waiting_rows().tolist():
            self._pin(row)

    def sync(self, queue: OrderedWaitingQueue) -> list[int]:
        """Take over what happened since the last call; returns the rows that are new."""
        new = []
        for request_id, request in queue.touched.items():
            # The same id may have ended and come again as another request.
            if request_id in self.table.row_of and self.table.requests[self.table.row_of[request_id]] is not request:
                self._remove(request_id)
            if request_id in queue.members:
                new += self._enters(request_id, request)
            elif request_id in self.table.row_of:
                self._leaves(request_id, request)
        queue.touched.clear()
        for request_id in [name for name, request in self._prefilling.items() if not is_prefilling(request)]:
            self._remove(request_id)
        for request_id, request in self._preempted.items():
            self._refresh(self.table.row_of[request_id], request)
        for row, hit_tokens in self.prefixes.update().items():
            self.table.hit_tokens[row] = hit_tokens
            self._pin(row)
        return new

    def prefilling_rows(self) -> list[int]:
        """Rows of the requests whose prefill runs."""
        return [self.table.row_of[request_id] for request_id in self._prefilling]

    def _enters(self, request_id: str, request: Request) -> list[int]:
        if request.status == RequestStatus.PREEMPTED:
            self._preempted[request_id] = request
        row = self.table.row_of.get(request_id)
        is_new = row is None
        if row is None:
            priority = int(request.priority) if self._by_priority else 0
            tokens = int(request.num_prompt_tokens), int(request.num_tokens)
            row = self.table.add(request_id, request, priority, float(request.arrival_time), *tokens)
        elif self.table.is_waiting[row]:  # started and preempted since the last call
            self.prefixes.look_again(row)
            return []
        else:  # preempted in mid-prefill: its account goes on
            del self._prefilling[request_id]
            self.table.is_waiting[row] = True
        self.prefixes.follow(row, request)
        return [row] if is_new else []

    def _refresh(self, row: int, request: Request) -> None:
        """What a preempted request had in flight still comes in, under asynchronous scheduling."""
        if self.table.all_tokens[row] != request.num_tokens:
            self.table.all_tokens[row] = request.num_tokens
            self.prefixes.look_again(row)

    def _leaves(self, request_id: str, request: Request) -> None:
        row = self.table.row_of[request_id]
        if not self.table.is_waiting[row]:
            return
        if not is_prefilling(request):
            self._remove(request_id)
            return
        self._stop_following(row)
        self._preempted.pop(request_id, None)
        self.table.is_waiting[row] = False
        self._prefilling[request_id] = request

    def _remove(self, request_id: str) -> None:
        row = self.table.row_of[request_id]
        if self.table.is_waiting[row]:
            self._stop_following(row)
        self._prefilling.pop(request_id, None)
        self._preempted.pop(request_id, None)
        self.table.remove(request_id)

    def _stop_following(self, row: int) -> None:
        self.prefixes.forget(row)
        if row in self._pinned:
            assert self._pins is not None
            self._pins.unpin(self._pinned.pop(row))

    def _pin(self, row: int) -> None:
        """Pin what the row would hit, and nothing else for it."""
        if self._pins is None:
            return
        block = self.prefixes.deepest_block(row)
        before = self._pinned.get(row)
        if block == before:
            return
        if block is not None:
            self._pins.pin(block)
            self._pinned[row] = block
        if before is not None:
            self._pins.unpin(before)
            if block is None:
                del self._pinned[row]

    def check_integrity(self, queue: OrderedWaitingQueue) -> None:
        """Assert that each waiting request has one row and at most one pin; call it right after `sync`."""
        self.table.check_integrity()
        self.prefixes.check_integrity()
        waiting = self.table.waiting_rows().tolist()
        assert {self.table.requests[row].request_id for row in waiting} == {one.request_id for one in queue}
        assert set(self._pinned) <= set(waiting)
        assert set(self._prefilling) == set(self.table.row_of) - {one.request_id for one in queue}


def is_prefilling(request: Request) -> bool:
    """Whether the request runs and its prompt is not all computed."""
    return bool(request.status == RequestStatus.RUNNING and request.num_computed_tokens < request.num_prompt_tokens)
