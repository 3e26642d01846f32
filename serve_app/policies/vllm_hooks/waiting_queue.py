"""The waiting queue in our order."""

from collections.abc import Iterable

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request


class OrderedWaitingQueue(FCFSRequestQueue):  # type: ignore[misc]  # vLLM is untyped here
    """A waiting queue in whatever order it was given last, under any of vLLM's policies, that notes who came and left.

    `add_request` puts a request last and `prepend_request` (a preemption) first, but only until the next step: nothing
    is admitted before the order is computed anew, and there a preempted request stands where its arrival puts it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.touched: dict[str, Request] = {}
        """Requests that entered or left since this was last emptied, by id."""
        self.members: dict[str, Request] = {}
        """The requests in the queue, by id."""

    def reorder(self, requests: Iterable[Request]) -> None:
        """Put the same requests into this order."""
        self.clear()
        self.extend(requests)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._enters(request)

    def add_requests(self, requests: Iterable[Request]) -> None:
        """`add_request` for each."""
        for request in requests:
            self.add_request(request)

    def prepend_request(self, request: Request) -> None:
        super().prepend_request(request)
        self._enters(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        entering = list(requests)
        super().prepend_requests(entering)
        for request in entering:
            self._enters(request)

    def pop_request(self) -> Request:
        request = super().pop_request()
        self._leaves(request)
        return request

    def remove_request(self, request: Request) -> None:
        super().remove_request(request)
        self._leaves(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        leaving = list(requests)
        super().remove_requests(leaving)
        for request in leaving:
            self._leaves(request)

    def _enters(self, request: Request) -> None:
        self.members[request.request_id] = self.touched[request.request_id] = request

    def _leaves(self, request: Request) -> None:
        # `remove_requests` is also asked for requests of the other queue.
        if self.members.pop(request.request_id, None) is not None:
            self.touched[request.request_id] = request
