"""The batcher in its thread: requests from other threads, cancellation, a full queue, a defect, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue

import pytest
from batches import Bench, Client, Schedule

from yggdrasil.config import GenerateConfig, ServeConfig
from yggdrasil.errors import ArtifactError, ConfigError, QueueFull, ServiceEnded
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.load import load_service
from yggdrasil.serve.request import DEFECT, Event, Observer, Request, StepReport
from yggdrasil.serve.service import Service

PATIENCE_S = 60.0  # no test waits so long unless something hangs


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


@contextmanager
def serving(batcher: Batcher, *, max_queue: int = 8) -> Iterator[Service]:
    service = Service(batcher, max_queue=max_queue, policy_name="off", observer=Observer())
    service.start()
    yield service
    service.drain(PATIENCE_S)


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
        assert all(each.ended.wait(PATIENCE_S) for each in clients)
        assert service.is_healthy
    assert not service.is_healthy
    assert all(each.tokens == bench.reference(each) for each in clients)


def test_a_cancelled_request_ends_and_gives_its_pages_back(bench: Bench) -> None:
    with serving(bench.batcher(Schedule([1]))) as service:
        begun = threading.Event()
        asking = Waiting([5, 6, 7], 240, on_first=begun.set)
        ticket = service.submit(asking.request())
        assert begun.wait(PATIENCE_S)
        service.cancel(ticket)
        service.cancel(ticket)  # once more does nothing
        assert asking.ended.wait(PATIENCE_S)
        info = service.info()
        assert info["free_pages"] == info["num_pages"]
    assert (asking.finish, asking.tokens) == ("cancelled", bench.reference(asking)[: len(asking.tokens)])


def test_a_full_queue_says_when_to_come_back(bench: Bench) -> None:
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
        held.set()
        assert all(each.ended.wait(PATIENCE_S) for each in clients)
        last = Waiting([5], 4)
        service.submit(last.request())  # there is room again
        assert last.ended.wait(PATIENCE_S)


def test_what_a_request_gets_wrong_is_said_at_once(bench: Bench) -> None:
    with (
        serving(bench.batcher(Schedule([0]))) as service,
        pytest.raises(ConfigError, match="max_new_tokens"),
    ):
        service.submit(Waiting([5], 10_000).request())


def test_a_defect_ends_the_requests_of_its_step_and_the_next_are_served(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = bench.batcher(Schedule([2]))
    forward = batcher.target.forward
    broken = Queue[None]()
    broken.put(None)

    def forward_once_broken(meta_NM: object) -> object:
        if not broken.empty():
            broken.get()
            raise RuntimeError("a defect")
        return forward(meta_NM)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, serving(batcher) as service:
        patch.setattr(batcher.target, "forward", forward_once_broken)
        asking = Waiting([5, 6], 4)
        service.submit(asking.request())
        assert asking.ended.wait(PATIENCE_S)
        # what is broken is for the log
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
    forward = batcher.target.forward

    def broken_for_the_first_two(meta_NM: object) -> object:
        if not clients[0].ended.is_set():
            raise RuntimeError("a defect at /some/path\n  frame #0")
        return forward(meta_NM)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher.target, "forward", broken_for_the_first_two)
        for request in requests:
            batcher.submit(batcher.ticket(request))
        with serving(batcher):
            assert all(each.ended.wait(PATIENCE_S) for each in clients)
    assert [each.finish for each in clients] == ["error", "error", "length", "length"]
    assert all(each.tokens == bench.reference(each) for each in clients[2:])
    assert caplog.text.count("a step failed") == 1


def test_a_long_prompt_that_was_not_in_the_forward_lives_on(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]))
    long = Waiting([7] * (2 * batcher.target.prefill_chunk), 3)
    later = Waiting([5, 6], 3)
    for each in (long, later):
        batcher.submit(batcher.ticket(each.request()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher.target, "forward", lambda meta_NM: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.step()
        batcher.fail()
    batcher.check()
    assert (long.finish, later.finish) == ("error", None)  # the chunk of the first one left no room
    while batcher.step() is not None:
        batcher.check()
    assert later.tokens == bench.reference(later)


def test_a_step_that_fails_before_its_forwards_ends_every_request(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]), num_rows=1)
    clients = [Waiting([5, 6], 4), Waiting([6, 7], 4)]
    for each in clients:
        batcher.submit(batcher.ticket(each.request()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "_reserve_", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.step()
        batcher.fail()
    assert [each.finish for each in clients] == ["error", "error"]
    assert batcher.step() is None
    batcher.check()


def test_a_token_beyond_the_embedding_is_refused_whatever_the_tokenizer_has(bench: Bench) -> None:
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


def test_draining_finishes_what_was_asked(bench: Bench) -> None:
    service = Service(bench.batcher(Schedule([2])), max_queue=8, policy_name="off", observer=Observer())
    service.start()
    clients = [Waiting([5 + place, 6], 20) for place in range(6)]
    for each in clients:
        service.submit(each.request())
    assert service.drain(PATIENCE_S)
    assert all(each.finish == "length" for each in clients)


def test_what_is_not_done_in_time_is_told_so(bench: Bench) -> None:
    service = Service(bench.batcher(Schedule([0])), max_queue=8, policy_name="off", observer=Observer())
    service.start()
    asking = Waiting([5, 6], 240)
    service.submit(asking.request())
    assert not service.drain(0.0)
    assert asking.finish == "cancelled"  # which the API answers with 503: no defect of ours
    assert asking.tokens == bench.reference(asking)[: len(asking.tokens)]


def test_a_dead_thread_takes_no_request_and_is_not_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(bench.batcher(Schedule([0])), max_queue=1, policy_name="off", observer=Observer())
    with pytest.raises(ServiceEnded):  # it does not live yet
        service.submit(Waiting([5, 6], 4).request())
    service.start()
    service._call(lambda: 1 / 0)  # a defect outside of a step
    service._thread.join(PATIENCE_S)
    for _ in range(2):  # never a full queue, which would have clients come back for ever
        with pytest.raises(ServiceEnded, match="start `ygg serve` again"):
            service.submit(Waiting([5, 6], 4).request())
    monkeypatch.setattr(service._idle, "wait", lambda timeout: pytest.fail("nobody will end this wait"))
    assert not service.drain(PATIENCE_S)
    assert "the decoding thread died" in caplog.text


def test_a_thread_that_dies_while_it_drains_ends_the_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = bench.batcher(Schedule([0]))
    service = Service(batcher, max_queue=8, policy_name="off", observer=Observer())
    # dies when all is done and the books are looked over
    asking = Waiting([5, 6], 8, on_first=lambda: setattr(batcher, "check", lambda: 1 / 0))
    service.start()
    service.submit(asking.request())
    wait = service._idle.wait
    was_woken = list[bool]()
    monkeypatch.setattr(
        service._idle, "wait", lambda timeout: was_woken.append(wait(timeout)) or was_woken[-1]
    )
    assert not service.drain(PATIENCE_S)
    # not by the end of its patience; it does not wait at all where the thread was quicker
    assert all(was_woken)
    assert not service.drain(PATIENCE_S)


def test_the_context_that_is_served_is_what_the_pages_hold(bench: Bench) -> None:
    page_bytes = bench.pair.bundle.page_bytes
    name = bench.pair.bundle.name
    for num_pages, context in ((4, 64), (1000, 256)):
        opened = load_service(
            name, ServeConfig(gamma_max=4, max_batch=2, kv_memory_bytes=num_pages * page_bytes), Observer()
        )
        assert opened.service.max_context == context
        opened.service.start()
        asking = Waiting([5, 6], 1)
        asking.config = GenerateConfig(ignore_eos=True)  # no limit: as many as there is room for
        opened.service.submit(asking.request())
        assert asking.ended.wait(PATIENCE_S)
        assert (asking.finish, len(asking.tokens)) == ("length", context - 2)
        assert opened.service.info()["max_context"] == context
        opened.service.drain(PATIENCE_S)


@pytest.mark.parametrize("policy", ("nightjar", "nightjar-printed", "dsd", "tetris", "tiers"))
def test_a_pair_is_served_under_every_kind_of_policy(bench: Bench, policy: str) -> None:
    opened = load_service(
        bench.pair.bundle.name, ServeConfig(policy=policy, gamma_max=4, max_batch=3), Observer()
    )
    opened.service.start()
    clients = [Waiting(list(range(30 + place, 38 + place)), 30) for place in range(5)]
    for each in clients:
        opened.service.submit(each.request())
    assert all(each.ended.wait(PATIENCE_S) for each in clients)
    assert opened.service.info()["policy"] == policy
    opened.service.drain(PATIENCE_S)
    assert all(each.tokens == bench.reference(each) for each in clients)


def test_what_cannot_be_opened_is_said_in_one_line(bench: Bench) -> None:
    name = bench.pair.bundle.name
    with pytest.raises(ArtifactError, match="no compiled pair named 'nobody'"):
        load_service("nobody", ServeConfig(), Observer())
    with pytest.raises(ConfigError, match="policy: 'best'"):
        load_service(name, ServeConfig(policy="best", max_batch=4), Observer())
    with pytest.raises(ConfigError, match="at least one page of .*; ygg serve --kv-memory"):
        load_service(name, ServeConfig(kv_memory_bytes=100, max_batch=4), Observer())
    with pytest.raises(ConfigError, match="at most 16, half .*; ygg serve --max-batch 16"):
        load_service(name, ServeConfig(max_batch=17), Observer())
    with pytest.raises(ConfigError, match="gamma_max: 999 .*; ygg serve --gamma-max"):
        load_service(name, ServeConfig(gamma_max=999, max_batch=4), Observer())
