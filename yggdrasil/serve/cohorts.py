"""Cohorts: requests of one kind, what speculation gains for them, and whether they may speculate.

A cohort is a workload label (`metadata.workload` of a request), greedy or sampled, with or without
processors. Only the first labels have cohorts of their own, so their number is bounded.

The policy decides for the whole batch; a cohort only takes rows out. In a step of B rows that takes t
milliseconds, where plain decoding would take p, a row that drafts gains

    accepted * p / B - share * (t - p)

milliseconds of the machine, where `share` is its part of the drafted tokens. The sum over rows is the time
that plain decoding would have needed for the same tokens, without t.

A cohort has an allowance, as in policy/guard.py: gains are added to it, and a share of all time of its
rows. While it is used up, the cohort's rows decode plainly; so it is tried again, the later the more it
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from yggdrasil.serve.request import CohortName, CohortStep, Request
from yggdrasil.state import StepResult

__all__ = ["MOST_LABELS", "OTHER", "Cohorts", "workload_of"]

OTHER = "other"  # the label of all labels that are too many, too long or not printable
MOST_LABELS = 16
MOST_CHARS = 64
# The allowance, in multiples of a plain step's milliseconds:
START_STEPS = 16.0
PROBE_STEPS = 0.25  # at which a stopped cohort is tried again
MAX_STEPS = 64.0  # that a cohort can collect by winning
REFILL_SHARE = 0.0075  # of the time of its rows; more than a policy spends on trying trees that lose
MOST_LOSS_STEPS = 4.0  # a slower step was interrupted by the machine


class Gain(NamedTuple):
    """Of one row in a step.

    Args:
        drafted: Draft tokens, verified or not; 0 in a row that decodes plainly.
        ms: Milliseconds gained; 0 if the step's time belongs to prompts, too.
    """

    drafted: int
    accepted: int
    ms: float


NO_GAIN = Gain(0, 0, 0.0)


@dataclass
class Cohort:
    """Totals of a cohort since the start, and its allowance.

    Attributes:
        drafted: Draft tokens, verified or not.
        gained_ms: Milliseconds over plain decoding, below 0 if speculation lost.
        speculates: Whether its rows may draft.
    """

    drafted: int = 0
    accepted: int = 0
    gained_ms: float = 0.0
    speculates: bool = True
    _allowance_ms: float | None = None

    def add_(self, gain: Gain, row_ms: float, plain_ms: float) -> None:
        """Add a row's step, and decide about the next one.

        Args:
            row_ms: The row's part of the step's milliseconds.
            plain_ms: Of a plain step; 0 if unknown, then nothing is decided.
        """
        self.drafted += gain.drafted
        self.accepted += gain.accepted
        self.gained_ms += gain.ms
        if plain_ms == 0:
            return
        if self._allowance_ms is None:
            self._allowance_ms = START_STEPS * plain_ms
        self._allowance_ms += max(gain.ms, -MOST_LOSS_STEPS * plain_ms) + REFILL_SHARE * row_ms
        self._allowance_ms = min(self._allowance_ms, MAX_STEPS * plain_ms)
        needed_ms = 0.0 if self.speculates else PROBE_STEPS * plain_ms
        self.speculates = self._allowance_ms >= needed_ms


class Cohorts:
    """All cohorts of a server.

    >>> cohorts = Cohorts()
    >>> cohorts.name_of(Request(prompt=[1], workload="agents"))
    CohortName(workload='agents', sampling='greedy', processors='no')
    >>> cohorts.speculates(_)
    True
    """

    def __init__(self) -> None:
        self._labels: set[str] = set()
        self._cohorts: dict[CohortName, Cohort] = {}

    def name_of(self, request: Request) -> CohortName:
        """The cohort of a request."""
        label = request.workload
        if label and label not in self._labels and len(self._labels) >= MOST_LABELS:
            label = OTHER
        elif label and label != OTHER:
            self._labels.add(label)
        sampling = request.config.sampling
        return CohortName(
            label,
            "sampled" if sampling.temperature > 0 else "greedy",
            "yes" if sampling.processors is not None else "no",
        )

    def speculates(self, name: CohortName) -> bool:
        """Whether rows of a cohort may draft."""
        return self._of(name).speculates

    def observe_(
        self, names: Sequence[CohortName], results: Sequence[StepResult], *, ms: float, plain_ms: float
    ) -> list[CohortStep]:
        """Add a step; returns what it changed, cohort by cohort.

        Args:
            names: The cohort of every row that decoded.
            results: Of these rows.
            ms: Milliseconds of the step.
            plain_ms: Of a plain step of these rows; 0 if unknown, or if prompts ran in the same step.
        """
        totals: dict[CohortName, Gain] = {}
        for name, gain in zip(names, _gains(results, ms, plain_ms), strict=True):
            self._of(name).add_(gain, ms / len(names), plain_ms)
            drafted, accepted, gained_ms = totals.get(name, NO_GAIN)
            totals[name] = Gain(drafted + gain.drafted, accepted + gain.accepted, gained_ms + gain.ms)
        return [CohortStep(name, *total, self.speculates(name)) for name, total in totals.items()]

    def _of(self, name: CohortName) -> Cohort:
        return self._cohorts.setdefault(name, Cohort())

    @property
    def state(self) -> list[dict[str, Any]]:
        """Names and totals of all cohorts in JSON values."""
        return [
            {
                **name._asdict(),
                "draft_tokens": cohort.drafted,
                "accepted_tokens": cohort.accepted,
                "gained_ms": round(cohort.gained_ms, 3),
                "speculates": cohort.speculates,
            }
            for name, cohort in self._cohorts.items()
        ]


def _gains(results: Sequence[StepResult], ms: float, plain_ms: float) -> list[Gain]:
    drafted = [result.drafted - 1 for result in results]
    accepted = [max(0, len(result.tokens) - 1) for result in results]
    total = sum(drafted)
    if plain_ms == 0 or total == 0:
        return [Gain(*counts, 0.0) for counts in zip(drafted, accepted, strict=True)]
    token_ms = plain_ms / len(results)
    extra_ms = (ms - plain_ms) / total  # for every drafted token
    return [
        Gain(num_drafted, num_accepted, num_accepted * token_ms - num_drafted * extra_ms)
        for num_drafted, num_accepted in zip(drafted, accepted, strict=True)
    ]


def workload_of(metadata: dict[str, Any]) -> str:
    """The label that a request's metadata gives its workload; empty without one."""
    label = metadata.get("workload", "")
    # metrics are UTF-8, in lines; half of a surrogate pair is not printable either
    is_label = isinstance(label, str) and len(label) <= MOST_CHARS and label.isprintable()
    return label if is_label else OTHER
