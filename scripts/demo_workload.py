"""The demo's requests: questions over a few shared reports, and cold long prompts between them."""

import random
from dataclasses import dataclass

from openai.types.chat import ChatCompletionMessageParam

EXCERPTS, QUESTIONS, COLD_PROMPTS = 4, 6, 3
EXCERPT_SENTENCES, COLD_SENTENCES = 24, 36
MEAN_GAP_S = 1.0
SEED = 7


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the workload."""

    label: str
    messages: list[ChatCompletionMessageParam]
    at_s: float


def workload(salt: str) -> list[Ask]:
    """Questions over shared excerpts and a few cold long prompts, in one seeded order; `salt` keeps caches apart."""
    rng = random.Random(SEED)
    prompts = [
        (f"excerpt {e + 1} q{q + 1}", _report(salt, e, EXCERPT_SENTENCES), _question(q))
        for e in range(EXCERPTS)
        for q in range(QUESTIONS)
    ]
    prompts += [(f"cold {c + 1}", _report(salt, 100 + c, COLD_SENTENCES), _question(c)) for c in range(COLD_PROMPTS)]
    rng.shuffle(prompts)
    asks, at_s = [], 0.0
    for label, document, question in prompts:
        asks.append(Ask(label, [{"role": "user", "content": f"{document}\n\n{question}"}], at_s))
        at_s += rng.expovariate(1 / MEAN_GAP_S)
    return asks


def _report(salt: str, number: int, sentences: int) -> str:
    rng = random.Random(number)
    lines = [
        f"In quarter {rng.randint(1, 4)} of {rng.randint(2015, 2024)} unit {rng.randint(1, 40)} reported revenue of "
        f"{rng.randint(10, 900)} million, {rng.choice(['up', 'down'])} {rng.randint(1, 30)} percent, driven by "
        f"{rng.choice(['services', 'devices', 'licences', 'cloud demand', 'logistics'])}."
        for _ in range(sentences)
    ]
    return f"Report {salt}-{number}. " + " ".join(lines)


def _question(number: int) -> str:
    return (
        "Which unit grew fastest?",
        "Which year was the weakest?",
        "What drove revenue most often?",
        "How many units are named?",
        "Which quarter is named first?",
        "What is the highest revenue?",
    )[number % 6]
