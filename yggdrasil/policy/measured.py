"""The profile of a pair, corrected by the milliseconds that steps take in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.state import Shape, StepMs

__all__ = ["GraphFactors", "MeasuredLatency"]

PACE_WEIGHT = 0.125  # of a new forward in the machine's pace
FORWARDS_MEMORY = 64  # the weight of a graph's old forwards fades after this many
LONG_AGO = 64  # forwards after which what is known of a graph counts no more than a new one
# After this many forwards without a graph, and again after each further as many, its known factor falls to
# a share of itself. So a graph that was much too slow is tried again later than one that was nearly good.
FORGOTTEN = 512
BETTER = 0.7
MOST_JUMP = 2.0  # times the expected ratio: a forward counts for no more, it may have been interrupted
SAME = 0.05  # factors within this share of the ones in use change nothing


class GraphFactors:
    """Measured over predicted milliseconds of one model's graphs.

    The ratio of a forward is the pace of the machine times the factor of its graph. The pace follows the
    last forwards, whichever graphs ran, so a graph is not blamed for a slow minute. The ratio of a graph
    that did not run for long falls to that of the best, little by little.

    A graph that never ran is expected to take as long as the next smaller one that ran, and the difference
    of the two in the profile times the smallest ratio, at most 1. So what a wrong profile makes too slow
    gets tried, and what may be better than the slow graphs that run, too. But where the whole machine is
    slower than its profile, a much larger graph does not seem faster than a small one, as it would at the
    profile's time. Between two graphs that ran, it takes at most its share of their difference by tokens.

    Args:
        profile: Predicted milliseconds.
    """

    def __init__(self, profile: Curve) -> None:
        self._ms = dict(zip(profile.sizes, profile.ms[0], strict=True))
        self._pace = 1.0
        self._factors: dict[int, float] = {}
        self._forwards: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._num_forwards = 0

    def observe_(self, size: int, ratio: float) -> None:
        """Add a forward of the graph of this size."""
        self._num_forwards += 1
        since = self._num_forwards - self._last.get(size, -FORGOTTEN)
        self._last[size] = self._num_forwards
        expected = self._expected(size)
        ratio = min(ratio, MOST_JUMP * expected * self._pace)
        self._forwards[size] = self._forwards.get(size, 0) + 1
        if since < FORGOTTEN:
            self._pace += PACE_WEIGHT * (ratio / expected - self._pace)
        rarest = 0.5 if since > LONG_AGO else 1 / FORWARDS_MEMORY
        weight = max(1 / self._forwards[size], rarest)
        self._factors[size] = expected + weight * (ratio / self._pace - expected)

    def at(self, size: int) -> float:
        """Measured over predicted milliseconds of a graph, at this pace of the machine."""
        return self._pace * self._expected(size)

    def _expected(self, size: int) -> float:
        """The factor of a graph, at first that of the best."""
        return self._factors.get(size, min(self._factors.values(), default=1.0))

    def at_each(self) -> dict[int, float]:
        """Measured over predicted milliseconds by graph, smallest first."""
        since = {size: self._num_forwards - last for size, last in self._last.items()}
        best = min((self._factors[size] for size in since if since[size] < FORGOTTEN), default=1.0)
        untried = min(1.0, self._pace * best)
        known_ms: dict[int, float] = {}
        for size, factor in self._factors.items():
            recalled = max(min(best, factor), factor * BETTER ** (since[size] // FORGOTTEN))
            known_ms[size] = self._pace * recalled * self._ms[size]
        return {
            size: known_ms.get(size, self._untried_ms(size, known_ms, untried)) / ms
            for size, ms in self._ms.items()
        }

    def _untried_ms(self, size: int, known_ms: Mapping[int, float], ratio: float) -> float:
        """Milliseconds of a graph that never ran, by those of the others and this ratio of the best."""
        smaller = max((each for each in known_ms if each < size), default=0)
        larger = min((each for each in known_ms if each > size), default=0)
        low_ms = known_ms.get(smaller, 0.0)
        expected_ms = low_ms + ratio * max(0.0, self._ms[size] - self._ms.get(smaller, 0.0))
        if not larger:
            return expected_ms
        high_ms = max(low_ms, known_ms[larger])
        share = (size - smaller) / (larger - smaller) if smaller else 1.0
        return min(expected_ms, low_ms + share * (high_ms - low_ms))


class MeasuredLatency:
    """Milliseconds of graphs and host: the profile's at first, later those of this process.

    Args:
        profile: What was measured when the pair was compiled.

    Attributes:
        in_use: The profile with the corrections of the last `use_`.
    """

    def __init__(self, profile: LatencyModel) -> None:
        self.in_use = profile
        self._profile = profile
        self._draft = GraphFactors(profile.draft)
        self._verify = GraphFactors(profile.verify)
        self._host_ms = {True: profile.step_host_ms, False: profile.plain_host_ms}  # with trees, without
        self._host_in_use = self._host_ms.copy()
        self._draft_in_use = self._draft.at_each()
        self._verify_in_use = self._verify.at_each()
        self._steps = {True: 0, False: 0}
        self._ran: set[tuple[str, int]] = set()  # graphs, by model and size

    def observe_(
        self, shapes: Sequence[Shape], num_tokens: int, context_len: int, ms: StepMs
    ) -> float | None:
        """Learn from a step, unless one of its graphs had never run: a first forward loads code and memory.

        Args:
            shapes: What each row drafted.
            num_tokens: Tokens of the target's forward.
            context_len: Tokens of context of the longest row.

        Returns:
            The step's milliseconds by what is known now over those by `in_use`; None if nothing was learnt.
        """
        profile = self._profile
        drafting = [shape for shape in shapes if shape.depth]
        drafts = bool(drafting)
        verify_size = profile.verify.graph(num_tokens)
        graphs = {("target", verify_size)}
        if drafting:
            draft_size, head_ms, growth_ms = _growth(profile, drafting, context_len)
            graphs.add(("draft", draft_size))
        if self._run_first_(graphs):
            return None
        used_ms = known_ms = cold_ms = 0.0
        if drafting and ms.growth:
            cold_ms = self._observe_draft_(draft_size, head_ms, growth_ms, ms)
            used_ms = self._draft_in_use[draft_size] * (head_ms + growth_ms)
            known_ms = self._draft.at(draft_size) * (head_ms + growth_ms)
        self._observe_host_(drafts, ms.host + cold_ms)
        used_ms += self._host_in_use[drafts]
        known_ms += self._host_ms[drafts]
        if ms.verify:  # on a device a forward may end after the step, which then does not know its time
            share = 1.0 if drafts else profile.plain_share
            verify_ms = share * profile.verify.at(num_tokens, context_len)
            self._verify.observe_(verify_size, ms.verify / verify_ms)
            used_ms += self._verify_in_use[verify_size] * verify_ms
            known_ms += self._verify.at(verify_size) * verify_ms
        return known_ms / used_ms if used_ms else 1.0

    @property
    def state(self) -> dict[str, Any]:
        """Measured over predicted milliseconds by graph, and the host's milliseconds: JSON values."""
        factors = {"draft": self._draft.at_each(), "target": self._verify.at_each()}
        return {
            "slowness": {
                model: {str(size): round(factor, 3) for size, factor in by_size.items()}
                for model, by_size in factors.items()
            },
            "host_ms": {"trees": round(self._host_ms[True], 3), "plain": round(self._host_ms[False], 3)},
        }

    def _run_first_(self, graphs: set[tuple[str, int]]) -> bool:
        """Whether one of these graphs, by model and size, ran for the first time."""
        is_first = not graphs <= self._ran
        self._ran |= graphs
        return is_first

    def _observe_draft_(self, size: int, head_ms: float, growth_ms: float, ms: StepMs) -> float:
        """Learn from a step's drafting.

        Args:
            size: The graph of growth.
            head_ms: Predicted milliseconds of the first forward.
            growth_ms: The same of all others; 0 if there are none.

        Returns:
            What the first forward took longer than one of growth would: the step's, not the graph's.
        """
        if not ms.head:
            self._draft.observe_(size, ms.growth / (head_ms + growth_ms))
            return 0.0
        if growth_ms:
            self._draft.observe_(size, ms.growth / growth_ms)
        return max(0.0, ms.head - self._draft.at(size) * head_ms)

    def _observe_host_(self, drafts: bool, ms: float) -> None:
        self._steps[drafts] += 1
        weight = max(1 / (1 + self._steps[drafts]), 1 / FORWARDS_MEMORY)
        expected = self._host_ms[drafts]
        # a single step may have been interrupted
        self._host_ms[drafts] += weight * (min(ms, MOST_JUMP * expected + 0.1) - expected)

    def use_(self) -> LatencyModel:
        """Correct the profile by all steps so far.

        Returns:
            `in_use`, a new object only if a factor changed by more than SAME. Cost: some 50 microseconds.
        """
        draft = self._draft.at_each()
        verify = self._verify.at_each()
        factors = (*draft.values(), *verify.values())
        factors_in_use = (*self._draft_in_use.values(), *self._verify_in_use.values())
        little_ms = SAME * self.in_use.plain_ms(0)
        if all(map(_is_same, factors, factors_in_use)) and all(
            abs(ms - self._host_in_use[drafts]) <= little_ms for drafts, ms in self._host_ms.items()
        ):
            return self.in_use
        self._draft_in_use = draft
        self._verify_in_use = verify
        self._host_in_use = self._host_ms.copy()
        self.in_use = replace(
            self._profile,
            draft=self._profile.draft.slower(draft),
            verify=self._profile.verify.slower(verify),
            step_host_ms=self._host_ms[True],
            plain_host_ms=self._host_ms[False],
        )
        return self.in_use


def _growth(latency: LatencyModel, drafting: Sequence[Shape], context_len: int) -> tuple[int, float, float]:
    """The draft's graph that runs most often in a step of these shapes.

    Returns:
        Its size; by the profile the milliseconds of the first forward, and of growth by further ones.
    """
    width = sum(shape.width for shape in drafting)
    depth = max(shape.depth for shape in drafting)
    head = 2 * len(drafting)
    head_ms = latency.draft.graphs_ms(head, context_len)
    if depth == 1:
        return latency.draft.graph(head), head_ms, 0.0
    growth_ms = depth * latency.growth_host_ms + (depth - 1) * latency.draft.graphs_ms(width, context_len)
    return latency.draft.graph(width), head_ms, growth_ms


def _is_same(factor: float, in_use: float) -> bool:
    return abs(factor - in_use) <= SAME * in_use
