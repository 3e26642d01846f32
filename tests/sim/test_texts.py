"""Real texts give lengths, 3.8 characters a token, and nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.sim.texts import chat_conversations, filings, multihop_texts, rag_conversations, text_tokens
from serve_app.sim.traces import DATA_VARIABLE, data_dir
from serve_app.sim.workloads import FilingParams, RetrievalParams, SaturatedParams, Turn, saturated

DATA = data_dir(os.environ)
needs_data = pytest.mark.skipif(DATA is None, reason=f"the recorded data is absent; {DATA_VARIABLE} names its folder")


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_counts_a_token_for_3_8_characters_and_one_at_least() -> None:
    assert [text_tokens("x" * characters) for characters in (0, 1, 38, 380)] == [1, 1, 10, 100]


def test_filings_give_their_pages_and_questions(tmp_path: Path) -> None:
    documents = written(tmp_path / "d", {"pages": ["x" * 380, "  ", "x" * 38]}, {"pages": []}, {"pages": ["x" * 76]})
    questions = written(tmp_path / "q", {"question": "x" * 38}, {"question": "x" * 57})
    params = filings(documents, questions, FilingParams(num_documents=3))
    assert (params.pages_tokens, params.questions_tokens) == (((100, 10), (20,)), (10, 15))
    assert params.num_documents == 3
    assert filings(documents, questions).num_documents == FilingParams().num_documents


def test_multihop_texts_give_passages_and_questions(tmp_path: Path) -> None:
    passages = written(tmp_path / "p", {"text": "x" * 38}, {"text": "x" * 380})
    questions = written(tmp_path / "q", {"question": "x" * 76})
    params = multihop_texts(passages, questions, RetrievalParams(num_passages=20))
    assert (params.passages_tokens, params.questions_tokens, params.num_passages) == ((10, 100), (20,), 20)


def test_chat_turns_begin_with_whatever_came_since_the_last_answer(tmp_path: Path) -> None:
    said = [
        ("system", 38),
        ("user", 38),
        ("function_call", 19),
        ("observation", 76),
        ("assistant", 38),
        ("assistant", 19),
    ]
    messages = [{"role": role, "content": "x" * characters} for role, characters in said]
    path = written(
        tmp_path / "c", {"messages": messages}, {"messages": [{"role": "user", "content": "never answered"}]}
    )
    assert chat_conversations(path) == ((Turn(20, 5), Turn(20, 15)),)


def test_answer_before_any_question_is_left_out(tmp_path: Path) -> None:
    said = [("assistant", "hello"), ("user", "x" * 38), ("assistant", "x" * 38)]
    path = written(tmp_path / "c", {"messages": [{"role": role, "content": content} for role, content in said]})
    assert chat_conversations(path) == ((Turn(10, 10),),)


def test_rag_conversations_end_with_their_target(tmp_path: Path) -> None:
    said = [("user", 38), ("agent", 76), ("user", 19)]
    row = {
        "input": [{"speaker": speaker, "text": "x" * characters} for speaker, characters in said],
        "targets": [{"speaker": "agent", "text": "x" * 380}],
    }
    assert rag_conversations(written(tmp_path / "c", row)) == ((Turn(10, 20), Turn(5, 100)),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "c:1: messages is missing"),
        ({"messages": []}, "c:1: messages is"),
        ({"messages": [{"role": "user"}]}, r"c:1: messages\[0\]: content is missing"),
        ({"messages": [{"role": 5, "content": ""}]}, r"c:1: messages\[0\]: role is 5; it must be a string"),
        ({"messages": [{"role": "user", "content": ""}]}, "c: messages has nothing"),
    ],
)
def test_bad_conversation_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_conversations(written(tmp_path / "c", row))


def test_bad_pages_and_empty_files_are_named(tmp_path: Path) -> None:
    questions, empty = written(tmp_path / "q", {"question": "who?"}), written(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"d:1: pages is .*; it must be a list of strings"):
        filings(written(tmp_path / "d", {"pages": ["x", 5]}), questions)
    with pytest.raises(ValueError, match="empty: pages has nothing"):
        filings(empty, questions)
    with pytest.raises(ValueError, match="empty: text has nothing"):
        multihop_texts(empty, questions)


@needs_data
def test_real_filings_make_prompts_of_up_to_16k_tokens() -> None:
    assert DATA is not None
    params = filings(DATA / "sec_10q" / "10q.jsonl.gz", DATA / "sec_10q" / "questions.jsonl.gz")
    assert (len(params.pages_tokens), len(params.questions_tokens)) == (8, 79)
    # 382,514 by the tokeniser that the 3.8 were measured with.
    assert sum(map(sum, params.pages_tokens)) == pytest.approx(382_514, rel=0.05)
    lengths = [len(one.prompt) for one in saturated(SaturatedParams(params, 200), np.random.default_rng(0))]
    assert max(lengths) <= 16_000 + max(params.questions_tokens)
    assert min(lengths) < 4_000 < max(lengths)


@needs_data
def test_real_passages_and_conversations_have_the_counts_of_their_readme() -> None:
    assert DATA is not None
    folder = DATA / "musique_hotpot_small"
    params = multihop_texts(folder / "2wikimultihopqa_corpus.jsonl.gz", folder / "musique_train.jsonl.gz")
    assert (len(params.passages_tokens), len(params.questions_tokens)) == (6_119, 100)
    rag = rag_conversations(DATA / "mtrag_un" / "reference.jsonl.gz")
    assert (len(rag), sum(map(len, rag))) == (442, 1_898)
    chats = chat_conversations(DATA / "multiturn_chat" / "llamafactory_multiturn.jsonl.gz")
    assert (len(chats), sum(map(len, chats))) == (397, 1_448)
