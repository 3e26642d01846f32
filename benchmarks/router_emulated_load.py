"""The load: prompts as text, and a client that sends each at its own time whatever became of the ones before it.

A client of our own, because vLLM's `bench serve` sends token ids where it keeps a trace's times, which sglang-router
refuses and our ingress routes by load alone, and because it keeps neither the replica nor the cached tokens.

A token id stands for one English word that the tokeniser makes one token of, so n ids make a text of n tokens, and two
texts share as many tokens as their ids. TTFT and latency run from the planned time of arrival. The client has the
benchmark's process for itself: no server runs in it.
"""

import asyncio
import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from router_emulated_label import HEADER as REPLICA_HEADER

from serve_app.sim.arrivals import Arrival

MODEL = "smollm2-135m-instruct-emulated"
PATH = "/v1/completions"
MAX_WORD_LETTERS = 6
LEAD_S = 0.5
"""From the start of a replay to its time 0."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One request, ready to be sent."""

    at_s: float
    """Wall seconds since the start of the replay."""
    prompt_tokens: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request; wall seconds."""

    at_s: float
    late_s: float
    """From the planned time to the time at which it was handed to the connection."""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    replica: str = ""
    error: str = ""
    """Empty when the answer is complete; else what went wrong, and the other fields count for nothing."""


class StreamError(ValueError):
    """The stream held an error, or ended too early."""


def single_token_words(tokenizer: Any) -> list[str]:
    """Words that are one token behind a space, wherever they stand; sorted, so the same for one tokeniser."""
    words = sorted(piece[1:] for piece in tokenizer.get_vocab() if _is_word(piece))
    return [word for word in words if len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1]


def timed(arrivals: Sequence[Arrival], words: Sequence[str], time_scale: float) -> list[Timed]:
    """The arrivals as requests, `time_scale` times as slow."""
    return [
        Timed(one.at_s * time_scale, len(one.prompt), _body(prompt_text(one.prompt.tolist(), words), one.output_tokens))
        for one in arrivals
    ]


def prompt_text(token_ids: Sequence[int], words: Sequence[str]) -> str:
    """One word for each id."""
    return "".join(f" {words[token_id % len(words)]}" for token_id in token_ids)


async def replay(url: str, requests: Sequence[Timed], limit_s: float) -> list[Answer]:
    """Send all requests at their times to the server at `url`; one answer each, in the order of `requests`.

    Args: limit_s: seconds from the last arrival on after which what is unanswered becomes an error.
    """
    loop = asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=None)
    gc.collect()
    gc.disable()  # a collection would send what is due meanwhile late
    try:
        async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            begun_s = loop.time() + LEAD_S
            ends_s = begun_s + max(one.at_s for one in requests) + limit_s
            return await asyncio.gather(*(_send(session, one, begun_s + one.at_s, ends_s) for one in requests))
    finally:
        gc.enable()


async def _send(session: aiohttp.ClientSession, request: Timed, planned_s: float, ends_s: float) -> Answer:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(planned_s - loop.time())
    late_s = loop.time() - planned_s
    try:
        async with asyncio.timeout_at(ends_s):
            return await _stream(session, request, planned_s, late_s)
    except TimeoutError:
        error = "unanswered at the end of the run"
    except (aiohttp.ClientError, OSError, StreamError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Answer(request.at_s, late_s, error=error)


async def _stream(session: aiohttp.ClientSession, request: Timed, planned_s: float, late_s: float) -> Answer:
    loop = asyncio.get_running_loop()
    ttft_s, usage = None, None
    async with session.post(PATH, data=request.body, headers={"content-type": "application/json"}) as response:
        if response.status != 200:
            raise StreamError(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            chunk = read_chunk(line)
            if chunk is None:
                continue
            if ttft_s is None and chunk["choices"]:
                ttft_s = loop.time() - planned_s
            usage = chunk.get("usage") or usage
    if ttft_s is None or usage is None:
        raise StreamError("the stream ended without a token or without its usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        request.at_s,
        late_s,
        ttft_s,
        loop.time() - planned_s,
        usage["prompt_tokens"],
        details.get("cached_tokens") or 0,
        usage["completion_tokens"],
        response.headers.get(REPLICA_HEADER, ""),
    )


def read_chunk(line: bytes) -> dict[str, Any] | None:
    """One line of a stream of server-sent events; None for what holds no chunk.

    Raises:
        StreamError: the line is no JSON, or an error of the server's.
    """
    field, _, data = line.strip().partition(b":")
    if field != b"data" or data.strip() == b"[DONE]":
        return None
    try:
        chunk = json.loads(data)
        if isinstance(chunk["choices"], list):
            return dict(chunk)
    except (ValueError, KeyError, TypeError):
        pass
    raise StreamError(f"the stream said {data[:200].decode(errors='replace')}")


def _is_word(piece: str) -> bool:
    word = piece[1:]
    return piece.startswith("Ġ") and len(word) <= MAX_WORD_LETTERS and word.isascii() and word.isalpha()


def _body(prompt: str, output_tokens: int) -> bytes:
    fields = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()
