"""Cohorts: what speculation gains for a kind of requests, and which kinds may speculate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from batches import Bench, Client, Schedule, submit

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.protocol import Load
from yggdrasil.serve import cohorts as cohorts_module
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.cohorts import MOST_LABELS, OTHER, Cohorts, workload_of
from yggdrasil.serve.request import CohortName, CohortStep, Request
from yggdrasil.state import PLAIN, Shape, StepResult
from yggdrasil.tree import TokenTree


def result(drafted: int, accepted: int) -> StepResult:
    """A row that drafted this many tokens."""
    shape = Shape(1, drafted) if drafted else PLAIN
    tokens = [7] * (accepted + 1)
    tree = TokenTree.root(7, 1)
    return StepResult(tokens, shape, drafted + 1, drafted + 1, 10, 1.0, lambda: tree, [0])


def request(workload: str = "", *, temperature: float = 0.0, **options: object) -> Request:
    sampling = SamplingConfig.of({"temperature": temperature, **options})
    return Request(prompt=[1], config=GenerateConfig(sampling=sampling), workload=workload)


def test_a_cohort_is_a_label_a_way_of_sampling_and_whether_logits_change() -> None:
    cohorts = Cohorts()
    assert cohorts.name_of(request()) == ("", "greedy", "no")
    assert cohorts.name_of(request("agents", temperature=0.7)) == ("agents", "sampled", "no")
    assert cohorts.name_of(request(repetition_penalty=1.2)) == ("", "greedy", "yes")


def test_labels_after_the_first_ones_are_one_cohort() -> None:
    cohorts = Cohorts()
    labels = [cohorts.name_of(request(f"job {place}")).workload for place in range(MOST_LABELS + 3)]
    assert labels == [*(f"job {place}" for place in range(MOST_LABELS)), *[OTHER] * 3]
    assert cohorts.name_of(request("job 0")).workload == "job 0"
    assert cohorts.name_of(request()).workload == ""


@pytest.mark.parametrize("label", ("a" * 65, 3, ["a"], {"a": 1}, "\ud800", "a\nb", "\0"))
def test_a_label_that_is_no_short_text_is_another_one(label: object) -> None:
    assert workload_of({"workload": label}) == OTHER


def test_a_label_is_read_from_the_metadata() -> None:
    assert workload_of({"workload": "agents", "user": "me"}) == "agents"
    assert workload_of({}) == ""


A = CohortName("a", "greedy", "no")
B = CohortName("b", "greedy", "no")


def test_the_gains_of_rows_are_the_time_of_plain_decoding_without_that_of_the_step() -> None:
    """A step of 13 ms emits 6 tokens of two rows; plain steps of 10 ms would have taken 30."""
    first, second = Cohorts().observe_([A, B], [result(4, 4), result(2, 0)], ms=13.0, plain_ms=10.0)
    assert first == CohortStep(A, 4, 4, 4 * 5.0 - 4 / 6 * 3.0, True)
    assert second == CohortStep(B, 2, 0, -2 / 6 * 3.0, True)
    assert first.gained_ms + second.gained_ms == pytest.approx(3 * 10.0 - 13.0)


def test_rows_of_one_cohort_are_added_and_a_row_without_drafts_gains_nothing() -> None:
    steps = Cohorts().observe_([A, B, A], [result(3, 1), result(0, 0), result(1, 1)], ms=9.0, plain_ms=9.0)
    assert steps == [CohortStep(A, 4, 2, 6.0, True), CohortStep(B, 0, 0, 0.0, True)]


def test_without_the_time_of_a_plain_step_drafts_are_counted_and_nothing_is_decided() -> None:
    cohorts = Cohorts()
    for _ in range(500):
        assert cohorts.observe_([A], [result(4, 0)], ms=50.0, plain_ms=0.0) == [
            CohortStep(A, 4, 0, 0.0, True)
        ]


def simulated(cohorts: Cohorts, num_steps: int, accepted: int) -> int:
    """Steps of one row that drafts when it may; returns how many drafted."""
    num_drafting = 0
    for _ in range(num_steps):
        drafts = cohorts.speculates(A)
        num_drafting += drafts
        row = result(4, accepted) if drafts else result(0, 0)
        cohorts.observe_([A], [row], ms=20.0 if drafts else 10.0, plain_ms=10.0)
    return num_drafting


def test_a_cohort_that_loses_stops_and_is_tried_again_within_its_allowance() -> None:
    cohorts = Cohorts()
    first = simulated(cohorts, 100, accepted=0)
    assert 10 < first < 20
    again = simulated(cohorts, 10_000, accepted=0)
    assert 50 < again < 100  # each loses 10 ms; the share of 100 s is 750 ms


def test_a_cohort_that_stopped_drafts_again_in_every_step_once_it_wins() -> None:
    """The share of its time pays for the first step, and that step's gain for all later ones."""
    cohorts = Cohorts()
    simulated(cohorts, 100, accepted=0)
    assert not cohorts.speculates(A)
    assert simulated(cohorts, 100, accepted=4) > 20
    assert simulated(cohorts, 100, accepted=4) == 100


def test_a_cohort_that_wins_never_stops_and_survives_some_losses() -> None:
    cohorts = Cohorts()
    assert simulated(cohorts, 100, accepted=3) == 100
    assert simulated(cohorts, 30, accepted=0) == 30


def test_a_single_interrupted_step_stops_no_cohort() -> None:
    cohorts = Cohorts()
    cohorts.observe_([A], [result(4, 3)], ms=60_000.0, plain_ms=10.0)
    assert cohorts.speculates(A)


def test_state_has_totals_and_the_decision() -> None:
    cohorts = Cohorts()
    cohorts.observe_([A], [result(4, 4)], ms=20.0, plain_ms=10.0)
    assert cohorts.state == [
        {
            "workload": "a",
            "sampling": "greedy",
            "processors": "no",
            "draft_tokens": 4,
            "accepted_tokens": 4,
            "gained_ms": 30.0,
            "speculates": True,
        }
    ]


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


LABELS = ("stories", "noise")


class Timed(Schedule):
    """Chains of three tokens, with a plain step of 10 ms."""

    def plain_ms(self, load: Load) -> float:
        return 10.0


class Pretended(Cohorts):
    """Drafts of the workload "noise" are never accepted, all others are; steps take 20 ms."""

    def observe_(
        self, names: Sequence[CohortName], results: Sequence[StepResult], *, ms: float, plain_ms: float
    ) -> list[CohortStep]:
        rows = [
            replace(result, tokens=[0] * (1 if name.workload == "noise" else result.drafted))
            for name, result in zip(names, results, strict=True)
        ]
        return super().observe_(names, rows, ms=20.0, plain_ms=plain_ms)


def test_rows_of_a_cohort_whose_drafts_are_never_accepted_stop_drafting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohorts_module, "START_STEPS", 3.0)
    batcher = bench.batcher(Timed([3]))
    batcher.cohorts = Pretended()
    config = GenerateConfig(max_new_tokens=120, ignore_eos=True)
    clients = [Client([5, 6, 7 + place], config, workload=label) for place, label in enumerate(LABELS)]
    submit(batcher, *clients)
    drafted = drafts_by_step(batcher)
    assert all(each.tokens == bench.reference(each) for each in clients)
    late = [rows for rows in drafted[10:] if len(rows) == 2]
    assert late, "both rows must still run"
    assert any(rows[0] for rows in late)
    assert not any(rows[1] for rows in late)


def drafts_by_step(batcher: Batcher) -> list[tuple[int, ...]]:
    """Run all requests; the draft tokens of every row, step by step."""
    drafted = []
    while (report := batcher.step()) is not None:
        drafted.append(report.drafted)
    return drafted
