"""The batcher in its thread: requests from other threads, cancellation, a full queue, defects, shutdown."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from batches import Bench, Client, Schedule

from yggdrasil.config import GenerateConfig, ServeConfig
from yggdrasil.errors import ArtifactError, ConfigError, QueueFull, ServiceEnded
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.load import load_service, most_rows
from yggdrasil.serve.request import DEFECT, Event, Observer, Request, StepReport
from yggdrasil.serve.service import Service

PATIENCE_S = 60.0  # no test waits this long unless something hangs


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


@contextmanager
def serving(batcher: Batcher, *, max_queue: int = 8) -> Iterator[Service]:
    service = new_service(batcher, max_queue=max_queue)
    service.start()
    yield service
    service.drain(PATIENCE_S)


def new_service(batcher: Batcher, *, max_queue: int = 8) -> Service:
    return Service(batcher, max_queue=max_queue, policy_name="off", observer=Observer())


class Waiting(Client):
    """A client whose end can be waited for."""

    def __init__(
        self, prompt: list[int], num_tokens: int, on_first: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(prompt, GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True))
        self.ended = threading.Event()
        self.on_first = on_first

    def request(self) -> Request:
        def on_event(event: Event) -> None:
            self.events.append(event)
            if len(self.events) == 1:
                self.on_first()
            if event.finish:
                self.ended.set()

        return Request(prompt=self.prompt, config=self.config, on_event=on_event)


def all_end(clients: Iterable[Waiting]) -> bool:
    """Wait until the requests of all clients have ended."""
    return all(each.ended.wait(PATIENCE_S) for each in clients)


def test_requests_of_many_threads_get_their_own_texts(bench: Bench) -> None:
    clients = [Waiting(list(range(10 + place, 20 + place)), 12 + place) for place in range(6)]
    with serving(bench.batcher(Schedule([3]))) as service:
        threads = [
            threading.Thread(target=lambda each=each: service.submit(each.request())) for each in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all_end(clients)
        assert service.is_healthy
    assert not service.is_healthy
    assert all(each.tokens == bench.reference(each) for each in clients)


def test_a_cancelled_request_ends_and_frees_its_pages(bench: Bench) -> None:
    with serving(bench.batcher(Schedule([1]))) as service:
        begun = threading.Event()
        asking = Waiting([5, 6, 7], 240, on_first=begun.set)
        ticket = service.submit(asking.request())
        assert begun.wait(PATIENCE_S)
        service.cancel(ticket)
        service.cancel(ticket)  # the second time does nothing
        assert asking.ended.wait(PATIENCE_S)
        info = service.info()
        assert info["free_pages"] == info["num_pages"]
    assert (asking.finish, asking.tokens) == ("cancelled", bench.reference(asking)[: len(asking.tokens)])


def test_a_full_queue_refuses_a_request_and_gives_a_time_to_retry(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]), num_rows=1)
    held = threading.Event()
    step = batcher.step

    def slow() -> StepReport | None:
        held.wait(PATIENCE_S)
        return step()

    batcher.step = slow  # type: ignore[method-assign]
    with serving(batcher, max_queue=2) as service:
        clients = [Waiting([5, 6], 4) for _ in range(2)]
        for each in clients:
            service.submit(each.request())
        with pytest.raises(QueueFull, match="2 requests are waiting") as caught:
            service.submit(Waiting([5], 4).request())
        assert caught.value.retry_after_s >= 1
        # as the header Retry-After, which has whole seconds
        assert f"try again in {math.ceil(caught.value.retry_after_s)} s" in str(caught.value)
        held.set()
        assert all_end(clients)
        last = Waiting([5], 4)
        service.submit(last.request())  # the queue has space again
        assert last.ended.wait(PATIENCE_S)


def test_clients_that_leave_during_a_step_do_not_count_as_waiting(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]))
    may_step = threading.Event()
    first = threading.Event()
    step = batcher.step

    def slow() -> StepReport | None:
        report = step()
        if first.is_set():
            may_step.wait(PATIENCE_S)
        return report

    batcher.step = slow  # type: ignore[method-assign]
    clients = [Waiting([5, 6], 8, on_first=first.set) for _ in range(4)]
    with serving(batcher, max_queue=3) as service:
        service.submit(clients[0].request())
        assert first.wait(PATIENCE_S)  # from here on the first step is held
        for each in clients[1:3]:
            service.cancel(service.submit(each.request()))
        service.on_step(SimpleNamespace(waiting=0, drafted=(), emitted=()))  # type: ignore[arg-type]
        service.submit(clients[3].request())
        may_step.set()
        assert all_end(clients)
    assert [each.finish for each in clients] == ["length", "cancelled", "cancelled", "length"]


def test_the_time_to_retry_does_not_grow_while_no_request_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = bench.batcher(Schedule([0]), num_rows=1)
    may_step = threading.Event()
    may_step.set()
    step = batcher.step

    def slow() -> StepReport | None:
        may_step.wait(PATIENCE_S)
        return step()

    batcher.step = slow  # type: ignore[method-assign]
    with serving(batcher, max_queue=2) as service:
        for _ in range(3):
            early = Waiting([5, 6], 4)
            service.submit(early.request())
            assert early.ended.wait(PATIENCE_S)
            assert service._idle.wait(PATIENCE_S)
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
        may_step.clear()
        clients = [Waiting([5, 6], 4) for _ in range(2)]
        for each in clients:
            service.submit(each.request())
        with pytest.raises(QueueFull) as caught:
            service.submit(Waiting([5], 4).request())
        assert caught.value.retry_after_s == 1
        monkeypatch.undo()
        may_step.set()
        assert all_end(clients)


def test_an_invalid_request_is_refused_at_once(bench: Bench) -> None:
    with (
        serving(bench.batcher(Schedule([0]))) as service,
        pytest.raises(ConfigError, match="max_new_tokens"),
    ):
        service.submit(Waiting([5], 10_000).request())


def test_a_defect_ends_the_requests_of_its_step_and_the_next_are_served(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = bench.batcher(Schedule([2]))
    verify = batcher.stepper.verify
    broken = Queue[None]()
    broken.put(None)

    def once_broken(*arguments: Any) -> Any:
        if not broken.empty():
            broken.get()
            raise RuntimeError("a defect")
        return verify(*arguments)

    with pytest.MonkeyPatch.context() as patch, serving(batcher) as service:
        patch.setattr(batcher.stepper, "verify", once_broken)
        asking = Waiting([5, 6], 4)
        service.submit(asking.request())
        assert asking.ended.wait(PATIENCE_S)
        # the cause is only logged
        assert (asking.finish, asking.events[-1].error) == ("error", DEFECT)
        again = Waiting([5, 6], 4)
        service.submit(again.request())
        assert again.ended.wait(PATIENCE_S)
        assert again.tokens == bench.reference(again)
    assert "a step failed" in caplog.text


def test_a_failing_forward_ends_only_the_requests_in_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = bench.batcher(Schedule([2]), num_rows=2)
    clients = [Waiting([5 + place, 6], 12) for place in range(4)]
    requests = [each.request() for each in clients]
    verify = batcher.stepper.verify

    def broken_for_the_first_two(*arguments: Any) -> Any:
        if not clients[0].ended.is_set():
            raise RuntimeError("a defect at /some/path\n  frame #0")
        return verify(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher.stepper, "verify", broken_for_the_first_two)
        for request in requests:
            batcher.submit(batcher.ticket(request))
        with serving(batcher):
            assert all_end(clients)
    assert [each.finish for each in clients] == ["error", "error", "length", "length"]
    assert all(each.tokens == bench.reference(each) for each in clients[2:])
    assert caplog.text.count("a step failed") == 1


def test_a_request_that_was_not_in_the_failed_forward_continues(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]))
    long = Waiting([7] * (2 * batcher.target.prefill_chunk), 3)
    later = Waiting([5, 6], 3)
    for each in (long, later):
        batcher.submit(batcher.ticket(each.request()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher.stepper, "verify", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.step()
        batcher.fail()
    batcher.scheduler.check()
    assert (long.finish, later.finish) == ("error", None)  # the chunk of the first one filled the graph
    while batcher.step() is not None:
        batcher.scheduler.check()
    assert later.tokens == bench.reference(later)


def test_a_step_that_fails_before_its_forwards_ends_every_request(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]), num_rows=1)
    clients = [Waiting([5, 6], 4), Waiting([6, 7], 4)]
    for each in clients:
        batcher.submit(batcher.ticket(each.request()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher.scheduler, "reserve_", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.step()
        batcher.fail()
    assert [each.finish for each in clients] == ["error", "error"]
    assert batcher.step() is None
    batcher.scheduler.check()


def test_a_token_beyond_the_embedding_is_refused(bench: Bench) -> None:
    vocab = bench.pair.bundle.vocab
    for token in (-1, vocab):
        asking = Waiting([5, token], 4)
        with (
            serving(bench.batcher(Schedule([0]))) as service,
            pytest.raises(ConfigError, match=f"prompt: {token} .* from 0 to {vocab - 1}"),
        ):
            service.submit(asking.request())
        with pytest.raises(ConfigError, match=f"prompt: {token} .* from 0 to {vocab - 1}"):
            next(bench.pair.engine.generate(asking.prompt, plain_policy(), asking.config))


def test_draining_finishes_all_requests(bench: Bench) -> None:
    service = new_service(bench.batcher(Schedule([2])))
    service.start()
    clients = [Waiting([5 + place, 6], 20) for place in range(6)]
    for each in clients:
        service.submit(each.request())
    assert service.drain(PATIENCE_S)
    assert all(each.finish == "length" for each in clients)


def test_draining_cancels_requests_that_do_not_finish_in_time(bench: Bench) -> None:
    service = new_service(bench.batcher(Schedule([0])))
    service.start()
    asking = Waiting([5, 6], 240)
    service.submit(asking.request())
    assert not service.drain(0.0)
    assert asking.finish == "cancelled"  # for which the API responds with 503
    assert asking.tokens == bench.reference(asking)[: len(asking.tokens)]


def test_a_dead_thread_takes_no_request_and_draining_does_not_wait_for_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = new_service(bench.batcher(Schedule([0])), max_queue=1)
    with pytest.raises(ServiceEnded):  # it has not started yet
        service.submit(Waiting([5, 6], 4).request())
    service.start()
    service._call(lambda: 1 / 0)  # a defect outside of a step
    service._thread.join(PATIENCE_S)
    for _ in range(2):  # never QueueFull, after which clients would retry for ever
        with pytest.raises(ServiceEnded, match="start `ygg serve` again"):
            service.submit(Waiting([5, 6], 4).request())
    monkeypatch.setattr(service._idle, "wait", lambda timeout: pytest.fail("this wait would never end"))
    assert not service.drain(PATIENCE_S)
    assert "the decoding thread died" in caplog.text


def test_a_thread_that_dies_while_it_drains_ends_the_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = bench.batcher(Schedule([0]))
    service = new_service(batcher)
    # the thread dies in its check after all requests are done
    asking = Waiting([5, 6], 8, on_first=lambda: setattr(batcher.scheduler, "check", lambda: 1 / 0))
    service.start()
    service.submit(asking.request())
    wait = service._idle.wait
    was_woken = list[bool]()
    monkeypatch.setattr(
        service._idle, "wait", lambda timeout: was_woken.append(wait(timeout)) or was_woken[-1]
    )
    assert not service.drain(PATIENCE_S)
    # the wait ends before its timeout; `drain` does not wait at all if the thread is already dead
    assert all(was_woken)
    assert not service.drain(PATIENCE_S)


def test_the_served_context_is_limited_by_the_pages(bench: Bench) -> None:
    page_bytes = bench.pair.bundle.page_bytes
    name = bench.pair.bundle.name
    for num_pages, context in ((4, 64), (1000, 256)):
        loaded = load_service(
            name, ServeConfig(gamma_max=4, max_batch=2, kv_memory_bytes=num_pages * page_bytes), Observer()
        )
        assert loaded.service.max_context == context
        loaded.service.start()
        asking = Waiting([5, 6], 1)
        asking.config = GenerateConfig(ignore_eos=True)  # no limit: as many tokens as the pages hold
        loaded.service.submit(asking.request())
        assert asking.ended.wait(PATIENCE_S)
        assert (asking.finish, len(asking.tokens)) == ("length", context - 2)
        assert loaded.service.info()["max_context"] == context
        loaded.service.drain(PATIENCE_S)


@pytest.mark.parametrize("policy", ("nightjar", "nightjar-printed", "dsd", "tetris", "tiers"))
def test_a_pair_is_served_under_every_kind_of_policy(bench: Bench, policy: str) -> None:
    loaded = load_service(
        bench.pair.bundle.name, ServeConfig(policy=policy, gamma_max=4, max_batch=3), Observer()
    )
    loaded.service.start()
    clients = [Waiting(list(range(30 + place, 38 + place)), 30) for place in range(5)]
    for each in clients:
        loaded.service.submit(each.request())
    assert all_end(clients)
    assert loaded.service.info()["policy"] == policy
    loaded.service.drain(PATIENCE_S)
    assert all(each.tokens == bench.reference(each) for each in clients)


def test_a_pair_that_cannot_be_served_is_an_error(bench: Bench) -> None:
    name = bench.pair.bundle.name
    with pytest.raises(ArtifactError, match="no compiled pair named 'nobody'"):
        load_service("nobody", ServeConfig(), Observer())
    with pytest.raises(ConfigError, match="policy: 'best'"):
        load_service(name, ServeConfig(policy="best", max_batch=4), Observer())
    with pytest.raises(ConfigError, match="at least one page of .*; ygg serve --kv-memory"):
        load_service(name, ServeConfig(kv_memory_bytes=100, max_batch=4), Observer())
    with pytest.raises(ConfigError, match="at most 16, half .*; ygg serve --max-batch 16"):
        load_service(name, ServeConfig(max_batch=17), Observer())
    assert most_rows(ServeConfig(), bench.pair.bundle.config) == 16
    with pytest.raises(ConfigError, match="gamma_max: 999 .*; ygg serve --gamma-max"):
        load_service(name, ServeConfig(gamma_max=999, max_batch=4), Observer())
