"""The benchmark's replay of arrivals: the same load always, the same texts on any clock, and figures that repeat where time is the profile's."""

from __future__ import annotations

import pytest
from batches import Bench

from bench.serving import Arrival, ProfileClock, Replay, poisson, replay
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.fixed import FixedGamma

TEXT = "Once upon a time there was a red fox named Tom. Tom liked to run in the forest."


@pytest.fixture(scope="module")
def served(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


@pytest.fixture(scope="module")
def arrivals(tiny: LoadedPair) -> list[Arrival]:
    return poisson([tiny.tokenizer.encode(TEXT)], rate=200.0, seconds=0.04, seed=3, output_tokens=(4, 12))


def by_the_profile(served: Bench, arrivals: list[Arrival]) -> Replay:
    batcher = served.batcher(FixedGamma(2))
    with ProfileClock(batcher, served.pair.latency).running():
        return replay(batcher, FixedGamma(2), arrivals)


def test_time_by_the_profile_repeats_and_changes_no_text(served: Bench, arrivals: list[Arrival]) -> None:
    assert len(arrivals) > 3
    first, again = (by_the_profile(served, arrivals) for _ in range(2))
    assert first.to_json() == again.to_json()
    assert first.texts == replay(served.batcher(FixedGamma(2)), FixedGamma(2), arrivals).texts


def test_time_by_the_profile_is_what_its_forwards_take_and_what_nobody_asked_for(served: Bench, arrivals: list[Arrival]) -> None:
    """One request that comes after a second: the second is slept away, its steps take the profile's milliseconds each."""
    done = by_the_profile(served, [Arrival(1.0, arrivals[0].prompt, 6)])
    latency, busy_ms = served.pair.latency, sum(report.total_ms for _, report in done.steps)
    assert done.seconds == pytest.approx(busy_ms / 1e3, abs=1e-5)
    assert all(report.verify_ms >= min(min(row) for row in latency.verify.ms) for _, report in done.steps)
    assert done.steps[0][0] == pytest.approx(1.0 + done.steps[0][1].total_ms / 1e3, abs=1e-5)
