"""The warning of a busy machine: the median step takes several times the profile, once a minute."""

from __future__ import annotations

import logging
from dataclasses import fields
from types import SimpleNamespace

import pytest

from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.serve.busy import EVERY_S, NUM_STEPS, BusyWatch
from yggdrasil.serve.request import Observer, StepReport

CURVE = Curve((0,), (1, 64), ((10.0, 10.0),))
LATENCY = LatencyModel(CURVE, CURVE, 0.0, 0.0, 0.0)


def report(verify_ms: float) -> StepReport:
    """A step of two rows."""
    numbers = {entry.name: 0 for entry in fields(StepReport)}
    return StepReport(**{**numbers, "drafted": (1, 1), "emitted": (2, 1), "verify_ms": verify_ms})


class Watched:
    """A watch with a clock that is set by hand, and the reports that it forwarded."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(now=100.0)
        self.seen: list[StepReport] = []
        observer = Observer()
        observer.on_step = self.seen.append  # type: ignore[method-assign]
        self.watch = BusyWatch(observer, LATENCY, now=lambda: self.clock.now)

    def run(self, verify_ms: float, count: int = NUM_STEPS) -> None:
        """Run `count` steps."""
        for _ in range(count):
            self.watch.on_step(report(verify_ms))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_slow_steps_give_one_warning_a_minute(caplog: pytest.LogCaptureFixture, watched: Watched) -> None:
    with caplog.at_level(logging.WARNING):
        watched.run(35.0, 3 * NUM_STEPS)
        assert [record.getMessage() for record in caplog.records] == [
            "the machine is busy: steps take 3.5 times as long as the pair's profile predicts"
        ]
        watched.clock.now += EVERY_S
        watched.run(35.0, 2)
    assert len(caplog.records) == 2
    assert len(watched.seen) == 3 * NUM_STEPS + 2


def test_normal_steps_and_a_few_slow_ones_give_no_warning(
    caplog: pytest.LogCaptureFixture, watched: Watched
) -> None:
    with caplog.at_level(logging.WARNING):
        watched.run(11.0)
        watched.run(900.0, NUM_STEPS // 4)
    assert caplog.records == []
