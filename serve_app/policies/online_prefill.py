"""Expected prefill seconds of a device that nobody measured, learned from the engine steps that it runs.

A step of x tokens, prefill and decode alike, is taken to last `base_s + s_per_token * x` seconds, so that prefilling
`todo` tokens on an idle engine takes

    s_per_token * todo + base_s * max(1, todo / largest)

where `largest` is the size of the largest usual step: a longer prompt pays the base once for each such step. What the
decodes of a step read from the KV cache counts towards its base. Cached tokens cost nothing here (the time of a step
doesn't show what they cost), and a longer context costs no more than the contexts that were seen did.

The line is fitted to medians, so that steps that took far too long (a kernel compiled, the process paused) count for
nothing while they are the fewer ones. Steps are kept apart by size, two bins an octave and the latest `STEPS_KEPT` in
each, so that thousands of decode steps don't push the few prefills out. The slope is the weighted median of the slopes
between the bins' medians (Theil and Sen; weights are token distances), the base the weighted median of what the slope
leaves over. A bin's weight halves with every `HALF_LIFE_STEPS` in which it got no step. Neither is ever negative: where
one would be, the other explains the times alone. Until `MIN_STEPS` were seen, `MIN_PREFILL_STEPS` of them with prefill
tokens, the answer is `START_TOKENS_PER_S`.

With asynchronous scheduling the time from one `schedule()` to the next is that of the step before, if the engine has
two steps in flight, and of this step, if its worker runs in the same process. Nothing says which, so both pairings are
kept, and the one that its own line explains better answers. (A pairing that gives steps without tokens much time is
wrong.) The first time after a pause belongs to no step before it, which `pause` says.

Source: ours. Cost: O(1) a step, about a microsecond; O(bins^2 + steps kept) = O(1) a fit, made when an answer is wanted
and `REFIT_STEPS` are new.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from serve_app.config import PrefillTable
from serve_app.policies.fairway import FloatArray, IntArray

START_TOKENS_PER_S = 10_000.0
"""Assumed before anything is known."""
MIN_STEPS = 32
"""Steps before the first fit."""
MIN_PREFILL_STEPS = 8
"""Of them, steps with prefill tokens; decodes alone don't tell how long a prefill takes."""
REFIT_STEPS = 32
"""New steps between two fits."""
STEPS_KEPT = 15
"""Latest steps of each size bin."""
MIN_BIN_STEPS = 3
"""A bin with fewer doesn't count: a median of two is no protection."""
HALF_LIFE_STEPS = 1_000.0
"""Steps in which a bin that gets none loses half of its weight."""
MIN_SPREAD = 2.0
"""Sizes that differ by less than this factor show no slope: time is then taken to be proportional to tokens."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """Seconds of a step by its tokens; neither `base_s` nor `s_per_token` is negative, and one is above 0."""

    base_s: float
    """Seconds of a step, whatever it computes."""
    s_per_token: float
    """Seconds that each of its tokens adds."""
    largest_tokens: float
    """Size of the largest usual step, at least 1."""
    error: float = 0.0
    """Typical distance of a step from the line, as a share of the line's value, and what steps without tokens took."""

    def step_s(self, tokens: float) -> float:
        return self.base_s + self.s_per_token * tokens


class OnlinePrefill:
    """Answers as a `PrefillProfile` does; never falls in `todo_tokens`, never negative."""

    def __init__(self) -> None:
        self._line = StepLine(0.0, 1.0 / START_TOKENS_PER_S, 1.0)
        self._same_step, self._step_before = StepBins(), StepBins()
        self._tokens_before: int | None = None
        self._num_steps = self._num_prefill_steps = self._num_fitted = 0

    def observe(self, step_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """An engine that was busy all the time scheduled a step of so many tokens and, `step_s` later, the next one.

        A step without tokens is observed too, as its time may be that of the step before. A time that is not above 0
        or not finite (a clock that was set) teaches nothing.

        Raises:
            ValueError: a negative number of tokens.
        """
        if prefill_tokens < 0 or decode_tokens < 0:
            raise ValueError(f"prefill_tokens={prefill_tokens}, decode_tokens={decode_tokens}; neither may be negative")
        tokens, before = prefill_tokens + decode_tokens, self._tokens_before
        self._tokens_before = tokens
        if not 0.0 < step_s < math.inf:
            return
        self._num_steps += 1
        self._num_prefill_steps += prefill_tokens > 0
        self._same_step.add(tokens, step_s, self._num_steps)
        if before is not None:
            self._step_before.add(before, step_s, self._num_steps)

    def pause(self) -> None:
        """The engine was idle since the last observation: the next time belongs to no step before it."""
        self._tokens_before = None

    @property
    def line(self) -> StepLine:
        """What is answered from, fitted anew if enough was observed since."""
        is_enough = self._num_steps >= MIN_STEPS and self._num_prefill_steps >= MIN_PREFILL_STEPS
        if is_enough and self._num_steps - self._num_fitted >= REFIT_STEPS:
            lines = [bins.line(self._num_steps) for bins in (self._same_step, self._step_before)]
            # Equally good ones: the first, which supposes nothing.
            self._line = min((line for line in lines if line), key=lambda line: line.error, default=self._line)
            self._num_fitted = self._num_steps
        return self._line

    @property
    def table(self) -> PrefillTable:
        """The answers of now as a table of two lengths, which says in `derived` where they come from."""
        line = self.line
        derived = f"assumed {START_TOKENS_PER_S:g} tokens/s until {MIN_STEPS} engine steps were seen"
        if self._num_fitted:
            derived = (
                f"learned from {self._num_fitted} engine steps: {line.base_s:.3g} s a step and {line.s_per_token:.3g} "
                f"s a token, at most {line.largest_tokens:.0f} tokens a step"
            )
        lengths = (1, max(2, round(line.largest_tokens)))
        return PrefillTable(
            device="any",
            model="any",
            dtype="any",
            vllm_version="any",
            date="",
            derived=derived,
            tokens=lengths,
            seconds=tuple(self.prefill_s_one(tokens) for tokens in lengths),
            base_s=line.base_s,
        )

    def prefill_s(self, todo_tokens: IntArray, context_tokens: IntArray | int = 0) -> FloatArray:
        """Seconds to prefill `todo_tokens` (n,), >= 0; the context on which they stand makes no difference.

        Returns: (n,).
        """
        line = self.line
        num_steps = np.maximum(todo_tokens / line.largest_tokens, 1.0)
        seconds: FloatArray = line.s_per_token * todo_tokens + line.base_s * num_steps
        return seconds

    def prefill_s_one(self, todo_tokens: float, context_tokens: float = 0.0) -> float:
        """`prefill_s` of one request, without numpy."""
        line = self.line
        return line.s_per_token * todo_tokens + line.base_s * max(todo_tokens / line.largest_tokens, 1.0)

    def hit_s(self, hit_tokens: float) -> float:
        """Seconds that cached tokens still cost: none that a step's time would show."""
        return 0.0


class StepBins:
    """The latest steps of each size, and the line through them."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        """Steps kept, at most `STEPS_KEPT` a bin."""
        return sum(map(len, self._steps.values()))

    def add(self, tokens: int, step_s: float, number: int) -> None:
        """A step of `tokens`, at least 0, as number `number` of all."""
        octave = tokens.bit_length()
        which = 2 * octave + (2 * tokens >> octave - 1 & 1) if tokens else 0
        if which not in self._steps:
            self._steps[which] = deque(maxlen=STEPS_KEPT)
        self._steps[which].append((step_s, tokens))
        self._latest[which] = number

    def line(self, number: int) -> StepLine | None:
        """The line as of step `number`; None while no bin has enough steps."""
        bins = [
            (0.5 ** ((number - self._latest[which]) / HALF_LIFE_STEPS), kept)
            for which, kept in self._steps.items()
            if which and len(kept) >= MIN_BIN_STEPS
        ]
        if not bins:
            return None
        points = [(_median(x for _, x in kept), _median(y for y, _ in kept), weight) for weight, kept in bins]
        line = _fitted(points)
        errors = [weight * _median(abs(y / line.step_s(x) - 1.0) for y, x in kept) for weight, kept in bins]
        error = sum(errors) / sum(weight for weight, _ in bins)
        if len(self._steps.get(0, ())) >= MIN_BIN_STEPS:
            # A step without tokens computes nothing: if it takes long, the time is another step's.
            error += _median(y for y, _ in self._steps[0]) / _median(line.step_s(tokens) for tokens, _, _ in points)
        return StepLine(line.base_s, line.s_per_token, line.largest_tokens, error)


def _fitted(points: list[tuple[float, float, float]]) -> StepLine:
    """The line through (tokens, seconds, weight), one point or more, tokens and seconds above 0."""
    points = sorted(points)
    smallest, largest = points[0][0], points[-1][0]
    slopes = [
        ((seconds - low_s) / (tokens - low), weight * low_weight * (tokens - low))
        for index, (tokens, seconds, weight) in enumerate(points)
        for low, low_s, low_weight in points[:index]
    ]
    if largest >= MIN_SPREAD * smallest:
        slope = max(_weighted_median(slopes), 0.0)
        # Small steps show the base best: what is left over counts by its share of the step.
        base_s = _weighted_median([(seconds - slope * tokens, weight / seconds) for tokens, seconds, weight in points])
        if base_s > 0.0:
            return StepLine(base_s, slope, largest)
    return StepLine(0.0, _weighted_median([(s / tokens, weight * tokens) for tokens, s, weight in points]), largest)


def _median(values: Iterable[float]) -> float:
    """The middle one; of an even number the upper of the two."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Of (value, weight): the smallest value up to which half of the weight lies."""
    ordered = sorted(values)
    half, reached = 0.5 * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    raise ValueError("there is no median of nothing")
