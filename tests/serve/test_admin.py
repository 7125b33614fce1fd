"""Speculation is switched off and on while the server runs, from its own machine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from batches import Bench, Schedule
from test_api import Running, server
from test_service import PATIENCE_S, Waiting
from test_shadow import Reports

from yggdrasil.pair import LoadedPair
from yggdrasil.serve.admin import _is_loopback
from yggdrasil.serve.service import Service

PATH = "/admin/speculation"


def switch(running: Running, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return httpx.post(running.url + PATH, json=fields, headers=headers or {}, timeout=10)


def test_speculation_is_switched_off_and_on_and_shown() -> None:
    with server() as running:
        assert running.get("/server_info").json()["speculation"] is True
        assert switch(running, enabled=False).json() == {"speculation": False}
        assert running.get("/server_info").json()["speculation"] is False
        assert switch(running, enabled=True).json() == {"speculation": True}
        assert running.get("/server_info").json()["speculation"] is True


@pytest.mark.parametrize(
    "fields", ({}, {"enabled": "no"}, {"enabled": None}, {"enabled": True, "other": 1})
)
def test_a_switch_without_a_clear_value_is_a_400(fields: dict[str, Any]) -> None:
    with server() as running:
        assert switch(running, **fields).status_code == 400


def test_other_machines_and_web_pages_are_refused() -> None:
    with server(allow_origins=["*"]) as running:
        for headers in ({"X-Forwarded-For": "10.0.0.7"}, {"Origin": "https://evil.example"}):
            refused = switch(running, headers=headers, enabled=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "loopback_only")
        rebound = switch(running, headers={"Host": "evil.example"}, enabled=False)
        assert rebound.status_code == 421
        assert running.service.speculates


def test_with_a_key_the_switch_needs_it() -> None:
    with server(api_key="a key") as running:
        assert switch(running, enabled=False).status_code == 401
        right = {"Authorization": "Bearer a key"}
        assert switch(running, headers=right, enabled=False).status_code == 200
        assert (
            switch(running, headers={**right, "X-Forwarded-For": "10.0.0.7"}, enabled=True).status_code
            == 403
        )


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    (
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("0.0.0.0", False),
        ("localhost.evil.example", False),
        ("", False),
    ),
)
def test_loopback_is_an_address_of_this_machine_alone(address: str, is_loopback: bool) -> None:
    assert _is_loopback(address) == is_loopback


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


def test_a_switched_off_batch_does_not_draft_and_its_texts_stay(bench: Bench) -> None:
    reports = Reports()
    batcher = bench.batcher(Schedule([3]))
    service = Service(batcher, max_queue=8, policy_name="fixed-3", observer=reports)
    service.start()
    clients = [Waiting([5, 6, 7], 40) for _ in range(3)]
    drafted = []
    for client, enabled in zip(clients, (True, False, True), strict=True):
        service.set_speculation(enabled)
        reports.steps.clear()
        service.submit(client.request())
        assert client.ended.wait(PATIENCE_S)
        assert service.info()["speculation"] is enabled
        drafted.append(sum(sum(step.drafted) for step in reports.steps))
    assert service.drain(PATIENCE_S)
    assert [bool(count) for count in drafted] == [True, False, True]
    assert all(each.tokens == bench.reference(each) for each in clients)
