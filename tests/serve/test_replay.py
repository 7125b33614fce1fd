"""The benchmark's replay of arrivals: the same load, the same texts on any clock, repeatable times."""

from __future__ import annotations

import time
from itertools import count

import pytest
from batches import Bench

from bench.lib.serving import Arrival, OwnClock, ProfileClock, Replay, in_turns, poisson, replay
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.serve.batcher import Batcher

TEXT = "Once upon a time there was a red fox named Tom. Tom liked to run in the forest."


@pytest.fixture(scope="module")
def served(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


@pytest.fixture(scope="module")
def arrivals(tiny: LoadedPair) -> list[Arrival]:
    return poisson([tiny.tokenizer.encode(TEXT)], rate=200.0, seconds=0.04, seed=3, output_tokens=(4, 12))


def profile_replay(served: Bench, arrivals: list[Arrival]) -> Replay:
    """A replay whose times are those of the profile."""
    batcher = served.batcher(FixedGamma(2))
    with ProfileClock(batcher, served.pair.latency).running():
        return replay(batcher, FixedGamma(2), arrivals)


def test_times_of_the_profile_repeat_and_change_no_text(served: Bench, arrivals: list[Arrival]) -> None:
    assert len(arrivals) > 3
    first, again = (profile_replay(served, arrivals) for _ in range(2))
    assert first.to_json() == again.to_json()
    assert first.texts == replay(served.batcher(FixedGamma(2)), FixedGamma(2), arrivals).texts


def test_a_request_takes_the_profile_s_time_of_its_forwards(served: Bench, arrivals: list[Arrival]) -> None:
    """One request arrives after a second without load, which does not count; then its steps take time."""
    done = profile_replay(served, [Arrival(1.0, arrivals[0].prompt, 6)])
    latency = served.pair.latency
    busy_ms = sum(report.total_ms for _, report in done.steps)
    assert done.seconds == pytest.approx(busy_ms / 1e3, abs=1e-5)
    assert all(report.verify_ms >= min(min(row) for row in latency.verify.ms) for _, report in done.steps)
    assert done.steps[0][0] == pytest.approx(1.0 + done.steps[0][1].total_ms / 1e3, abs=1e-5)


def test_an_own_clock_stops_while_others_run_and_skips_sleep() -> None:
    ticks = count()
    clock = OwnClock(wall=lambda: float(next(ticks)))
    start = clock.now
    with clock.running():  # the wall clock advances by 1 when it is read: at the start, here, at the end
        assert time.perf_counter() == start + 1
    assert clock.now == clock.now == start + 2
    for _ in range(5):
        next(ticks)
    with clock.running():
        time.sleep(100.0)
        assert time.perf_counter() == pytest.approx(start + 103, abs=1e-4)


def test_arms_in_turns_take_the_time_that_they_take_alone(
    tiny: LoadedPair, arrivals: list[Arrival]
) -> None:
    """Times are those of the profile, so nothing else can make a difference."""
    benches = {gamma: Bench(tiny) for gamma in (0, 3)}

    def arm(gamma: int) -> tuple[Batcher, ProfileClock]:
        batcher = benches[gamma].batcher(FixedGamma(gamma))
        return batcher, ProfileClock(batcher, tiny.latency)

    together = in_turns(
        {str(gamma): arm(gamma) for gamma in benches},
        {str(gamma): FixedGamma(gamma) for gamma in benches},
        arrivals,
    )
    for gamma in benches:
        batcher, clock = arm(gamma)
        with clock.running():
            alone = replay(batcher, FixedGamma(gamma), arrivals)
        assert together[str(gamma)].to_json() == alone.to_json()
        assert together[str(gamma)].texts == alone.texts
