"""Stages are summed in their order, from any thread; a device times its own, as launches return at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from yggdrasil.trace import MOST_NOTED, DeviceTrace, Trace


class Device:
    """A stream with its own clock; the host waits for it only explicitly."""

    def __init__(self) -> None:
        self.queued_ms = 0.0  # when all launched work will be done
        self.done_ms = 0.0  # the device's progress that the host has observed

    def launch(self, ms: float) -> None:
        self.queued_ms += ms

    def sync(self) -> None:
        self.done_ms = self.queued_ms

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """Like torch.cuda.Event, on that stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.at_ms = self._device.queued_ms

    def query(self) -> bool:
        return self.at_ms <= self._device.done_ms

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


def test_stages_keep_their_order_and_are_summed_once_while_others_read() -> None:
    trace = Trace()

    def run(_: int) -> None:
        trace.note(("draft", "verify"), (1.0, 2.0, 4.0))
        assert trace.total_ms["draft"] > 0

    trace.note(("policy",), (0.0, 1.0))
    with ThreadPoolExecutor(max_workers=4) as threads:
        list(threads.map(run, range(2 * MOST_NOTED)))
    assert list(trace.total_ms) == ["policy", "draft", "verify"]
    assert trace.count == {"policy": 1, "draft": 2 * MOST_NOTED, "verify": 2 * MOST_NOTED}
    assert trace.total_ms["verify"] == 4 * MOST_NOTED


def test_a_forward_s_time_is_its_own_and_not_that_of_the_stage_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    trace = DeviceTrace()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    for _ in range(2):
        with trace.stage("draft"):
            device.launch(2.0)
            device.sync()
        with trace.stage("verify"):
            device.launch(5.0)
        before = dict(trace.total_ms)
        with trace.stage("accept"):
            device.launch(0.5)
            device.sync()
        assert trace.total_ms["verify"] - before.get("verify", 0.0) == 5.0
    assert trace.total_ms == {"draft": 4.0, "verify": 10.0, "accept": 1.0}
    assert trace.count == {"draft": 2, "verify": 2, "accept": 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_times_what_the_host_only_launched() -> None:
    trace = DeviceTrace()
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with trace.stage("verify"):
        for _ in range(50):
            matrix = torch.tanh(matrix @ matrix)
    with trace.stage("accept"):
        matrix.sum().item()
    torch.cuda.synchronize()
    with trace.stage("commit"):
        pass
    assert trace.total_ms["verify"] > 10 * trace.total_ms["accept"]
