"""Real texts as lengths for the generators: filings with questions, short passages, conversations.

No text enters a workload: a page, a passage or a message counts 1 token for each 3.8 characters (about what the
SmolLM2 tokeniser makes of filings; other tokenisers make somewhat fewer), and its ids are drawn. Cost: O(bytes).
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from serve_app.sim.trace_rows import Row, json_rows
from serve_app.sim.workloads.documents import FilingParams
from serve_app.sim.workloads.passages import MULTIHOP, RetrievalParams
from serve_app.sim.workloads.sessions import Turn

CHARACTERS_PER_TOKEN = 3.8

Items = TypeVar("Items", bound=tuple[object, ...])

GENERATED_ROLES = frozenset({"agent", "assistant", "function_call"})
"""Speakers whose messages the model wrote; all others' come in from outside."""


def text_tokens(text: str) -> int:
    """Tokens of a text, about; at least 1."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def filings(documents: Path, questions: Path, params: FilingParams | None = None) -> FilingParams:
    """`params` (by default the default ones) with the page lengths and question lengths of real quarterly reports.

    Args:
        documents: JSON lines with `pages`, a list of texts; empty pages and documents without a page are left out.
        questions: JSON lines with `question`.

    Raises:
        ValueError: a bad row, by file, line and field, or a file without a row that counts.
    """
    pages = [tuple(text_tokens(page) for page in row.texts("pages") if page.strip()) for row in json_rows(documents)]
    return replace(
        params or FilingParams(),
        pages_tokens=_some(documents, "pages", tuple(document for document in pages if document)),
        questions_tokens=_lengths(questions, "question"),
    )


def multihop_texts(passages: Path, questions: Path, params: RetrievalParams = MULTIHOP) -> RetrievalParams:
    """`params` with the lengths of real passages (`text`) and questions (`question`), both JSON lines.

    Raises:
        ValueError: a bad row, by file, line and field, or a file without rows.
    """
    return replace(
        params,
        passages_tokens=_lengths(passages, "text"),
        questions_tokens=_lengths(questions, "question"),
    )


def rag_conversations(path: Path) -> tuple[tuple[Turn, ...], ...]:
    """Conversations as JSON lines with `input` (messages of `speaker` and `text`) and `targets`, the last answer.

    Retrieved passages are given for the last turn only, so they are left out of all.

    Raises:
        ValueError: a bad row, by file, line and field, or a file without a conversation.
    """
    return _conversations(path, ("input", "targets"), "speaker", "text")


def chat_conversations(path: Path) -> tuple[tuple[Turn, ...], ...]:
    """Conversations as JSON lines with `messages` of `role` and `content`; a tool's result begins a turn, too.

    Raises:
        ValueError: a bad row, by file, line and field, or a file without a conversation.
    """
    return _conversations(path, ("messages",), "role", "content")


def _conversations(path: Path, lists: tuple[str, ...], speaker: str, text: str) -> tuple[tuple[Turn, ...], ...]:
    rows = [[message for name in lists for message in row.rows(name)] for row in json_rows(path)]
    turns = (_turns(messages, speaker, text) for messages in rows)
    return _some(path, lists[0], tuple(conversation for conversation in turns if conversation))


def _turns(messages: list[Row], speaker: str, text: str) -> tuple[Turn, ...]:
    """One turn for each answer; an answer with nothing new before it continues the one before."""
    turns: list[Turn] = []
    new_tokens = 0
    for message in messages:
        tokens = text_tokens(message.text(text))
        if message.text(speaker) not in GENERATED_ROLES:
            new_tokens += tokens
        elif new_tokens:
            turns.append(Turn(new_tokens, tokens))
            new_tokens = 0
        elif turns:
            turns[-1] = replace(turns[-1], output_tokens=turns[-1].output_tokens + tokens)
    return tuple(turns)


def _lengths(path: Path, name: str) -> tuple[int, ...]:
    return _some(path, name, tuple(text_tokens(row.text(name)) for row in json_rows(path)))


def _some(path: Path, name: str, items: Items) -> Items:
    if not items:
        raise ValueError(f"{path}: {name} has nothing in the whole file; there must be at least one")
    return items
