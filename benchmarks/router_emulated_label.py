"""ASGI middleware that names the engine in every response of a plain vLLM server, as our app's replicas do.

Chosen by vLLM's own argument: `--middleware router_emulated_label.EngineName`, with this folder in PYTHONPATH.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-fairway-replica"


class EngineName:
    """Pure ASGI, so that a stream passes chunk by chunk. The name is the server's port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"engine-{scope['server'][1]}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self._app(scope, receive, named)
