"""A share of requests is decoded both ways; the client gets the plain text."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
from batches import Bench, Schedule
from test_api import REPORT
from test_service import PATIENCE_S, Waiting, all_end, new_service

from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig, ServeConfig
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.request import Event, Observer, Request, RequestReport, ShadowReport, StepReport
from yggdrasil.serve.service import Service
from yggdrasil.serve.shadow import Shadow


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


class Reports(Observer):
    """Keeps all reports."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.ends: list[RequestReport] = []
        self.shadows: list[ShadowReport] = []
        self.compared = threading.Event()

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_finish(self, report: RequestReport) -> None:
        self.ends.append(report)

    def on_shadow(self, report: ShadowReport) -> None:
        self.shadows.append(report)
        self.compared.set()


def shadowing(batcher: Batcher, reports: Reports) -> Service:
    return Service(batcher, max_queue=8, policy_name="fixed-3", observer=reports, shadow_rate=1.0)


def run_one_by_one(service: Service, clients: list[Waiting], reports: Reports) -> None:
    """Every request and its shadow, then the next request."""
    for client in clients:
        reports.compared.clear()
        service.submit(client.request())
        assert reports.compared.wait(PATIENCE_S)
        assert client.ended.is_set()


def test_requests_are_served_plain_and_decoded_again_with_speculation(bench: Bench) -> None:
    reports = Reports()
    service = shadowing(bench.batcher(Schedule([3])), reports)
    service.start()
    clients = [Waiting([5, 6, 7 + place], 30) for place in range(3)]
    run_one_by_one(service, clients, reports)
    state = service.info()["shadow"]
    assert service.drain(PATIENCE_S)
    assert all(each.tokens == bench.reference(each) for each in clients)
    assert [each.differs for each in reports.shadows] == [False] * 3
    assert (state["requests"], state["differences"]) == (3, 0)
    assert state["time_ratio"] > 0
    assert [(end.is_shadow, end.emitted_tokens) for end in reports.ends] == [(False, 30), (True, 30)] * 3
    assert [end.target_passes for end in reports.ends[::2]] == [30] * 3
    assert all(end.target_passes < 30 for end in reports.ends[1::2])
    assert sum(step.returned_tokens for step in reports.steps) == 90  # clients got nothing of the shadows


def test_no_request_is_decoded_twice_while_another_one_waits(bench: Bench) -> None:
    reports = Reports()
    batcher = bench.batcher(Schedule([3]), num_rows=1)
    service = shadowing(batcher, reports)
    clients = [Waiting([5, 6, 7 + place], 20) for place in range(3)]
    held = threading.Event()
    step = batcher.step

    def slow() -> StepReport | None:
        held.wait(PATIENCE_S)
        return step()

    batcher.step = slow  # type: ignore[method-assign]
    service.start()
    for client in clients:
        service.submit(client.request())
    held.set()
    assert all_end(clients)
    assert service.drain(PATIENCE_S)
    assert all(each.tokens == bench.reference(each) for each in clients)
    assert reports.shadows == []


def test_a_grammar_that_is_gone_is_not_compiled_again_for_a_shadow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    batcher = bench.batcher(Schedule([3]))
    service = shadowing(batcher, reports)
    client = Waiting([5, 6, 7], 8)
    sampling = SamplingConfig.of({"grammar": GrammarConfig.of("regex", "a")})
    monkeypatch.setattr(batcher.grammars, "state", lambda grammar: None)  # any text
    monkeypatch.setattr(batcher.grammars, "knows", lambda grammar: False)
    request = client.request()
    config = replace(request.config, ignore_eos=False, sampling=sampling)
    service.start()
    service.submit(replace(request, config=config))
    monkeypatch.setattr(batcher.grammars, "state", lambda grammar: 1 / 0)
    assert client.ended.wait(PATIENCE_S)
    assert service.info()["shadow"]["requests"] == 0
    assert service.drain(PATIENCE_S)
    assert [end.is_shadow for end in reports.ends] == [False]


def test_a_cancelled_request_has_no_shadow(bench: Bench) -> None:
    reports = Reports()
    service = shadowing(bench.batcher(Schedule([3])), reports)
    service.start()
    client = Waiting([5, 6, 7], 200)
    service.cancel(service.submit(client.request()))
    assert client.ended.wait(PATIENCE_S)
    service.info()
    assert service.drain(PATIENCE_S)
    assert [(end.finish, end.is_shadow) for end in reports.ends] == [("cancelled", False)]


def test_nothing_is_decoded_twice_without_speculation_or_a_rate(bench: Bench) -> None:
    assert "shadow" not in new_service(bench.batcher(Schedule([3])))._info()
    shadow = Shadow(1.0, lambda report: None)
    request = Request(prompt=[1])
    assert shadow.draws(request)
    assert not shadow.draws(replace(request, speculation=0))
    assert not shadow.draws(replace(request, config=GenerateConfig(plain=True)))
    assert not Shadow(0.0, lambda report: None).draws(request)


def test_a_rate_is_a_share_of_the_requests() -> None:
    """1000 draws at 0.3 give 300 with a standard deviation of 14.5: 6 of them are 87."""
    shadow = Shadow(0.3, lambda report: None)
    assert abs(sum(shadow.draws(Request(prompt=[1])) for _ in range(1000)) - 300) < 87


def pair_of(shadow: Shadow) -> tuple[list[Event], Request, list[Request]]:
    """What the client gets, its request as it is served, and the shadow once it is queued."""
    client: list[Event] = []
    queued: list[Request] = []
    request = Request(prompt=[1], num_top=2, on_event=client.append)
    return client, shadow.served(request, queued.append), queued


@pytest.mark.parametrize(
    ("tokens", "finish", "differs"),
    (
        ([4, 5], "stop", False),
        ([4, 6], "stop", True),
        ([4], "stop", True),
        ([4, 5], "length", True),
        ([4, 5], "error", True),
    ),
)
def test_other_tokens_or_another_end_are_a_difference(
    caplog: pytest.LogCaptureFixture, tokens: list[int], finish: str, differs: bool
) -> None:
    reports: list[ShadowReport] = []
    shadow = Shadow(1.0, reports.append)
    client, served, queued = pair_of(shadow)
    assert served.speculation == 0
    served.on_event(Event("a", [4]))
    served.on_event(Event("b", [5], finish="stop", report=REPORT))
    assert [event.text for event in client] == ["a", "b"]
    [second] = queued
    assert (second.speculation, second.is_shadow, second.num_top) == (None, True, None)
    with caplog.at_level(logging.ERROR):
        last = replace(REPORT, ttft_ms=10.0, total_ms=60.0)
        second.on_event(Event("", tokens, finish=finish, report=last))  # type: ignore[arg-type]
    assert len(client) == 2
    assert reports == [ShadowReport(differs, 100.0, 50.0)]
    assert (shadow.state["differences"], shadow.state["time_ratio"]) == (differs, 2.0)
    assert bool(caplog.records) == differs


@pytest.mark.parametrize("finish", ("cancelled", "error"))
def test_a_request_that_does_not_end_by_itself_has_no_shadow(finish: str) -> None:
    _, served, queued = pair_of(Shadow(1.0, lambda report: None))
    served.on_event(Event("", (), finish=finish, report=REPORT))  # type: ignore[arg-type]
    assert queued == []


def test_a_shadow_that_a_shutdown_ends_is_not_compared() -> None:
    shadow = Shadow(1.0, lambda report: None)
    _, served, queued = pair_of(shadow)
    served.on_event(Event("a", [4], finish="stop", report=REPORT))
    queued[0].on_event(Event("", (), finish="cancelled", report=REPORT))
    assert shadow.compared == 0


@pytest.mark.parametrize("fields", ({"shadow": 1.5}, {"shadow": -0.1}, {"shadow": 0.5, "policy": "off"}))
def test_a_rate_outside_0_to_1_or_without_speculation_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="shadow"):
        ServeConfig(**fields)  # type: ignore[arg-type]
