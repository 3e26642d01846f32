"""The waiting queue in our order."""

from collections.abc import Iterable

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request


class OrderedWaitingQueue(FCFSRequestQueue):  # type: ignore[misc]  # vLLM is untyped here
    """A waiting queue in whatever order it was given last, under any of vLLM's policies.

    `add_request` puts a request last and `prepend_request` (a preemption) first, but only until the next step: nothing
    is admitted before the order is computed anew, and there a preempted request stands where its arrival puts it.
    """

    def reorder(self, requests: Iterable[Request]) -> None:
        self.clear()
        self.extend(requests)
