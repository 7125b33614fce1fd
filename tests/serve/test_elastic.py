"""Elastic memory: lending the draft's memory and taking it back changes no text and loses no page.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import pytest
import torch
from batches import Client, Schedule, pool_over, run, submit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yggdrasil.config import GenerateConfig, SamplingConfig, ServeConfig
from yggdrasil.errors import CapacityError
from yggdrasil.loading import load_draft_weights
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.protocol import BatchPolicy
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve import draft_memory
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.draft_memory import DraftMemory, MemoryState, weight_bytes
from yggdrasil.serve.elastic import ElasticMemory, scarce_below
from yggdrasil.serve.load import load_batcher

TEXT = 3 * (
    "Once upon a time there was a red fox named Tom. Tom liked to run in the forest. "
    "One day Tom saw a small owl near the river. "
)
NUM_ROWS = 4
NUM_PAGES = 14
LOW_PAGES = 3


@pytest.mark.parametrize(
    ("share", "num_pages", "low_pages"),
    [(0.1, 9, 1), (0.1, 2, 1), (0.02, 40, 1), (0.1, 25, 2), (0.99, 10, 9), (0.99, 2, 1), (0.1, 1, 0)],
)
def test_tau_low_is_at_least_one_page_and_less_than_all(
    share: float, num_pages: int, low_pages: int
) -> None:
    """With 0 pages the draft would never leave, with all of them it would never come back."""
    assert scarce_below(share, num_pages) == low_pages


def digest(memory: DraftMemory) -> str:
    """Digest of all weights in the memory."""
    found = blake2b()
    for name in sorted(memory.weights):
        found.update(memory.weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class ElasticBench:
    """One set of graphs over elastic memory; each test gets an empty pool of NUM_PAGES pages before it."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self.page_bytes = pair.bundle.page_bytes
        self.loaded = load_batcher(
            pair.bundle,
            ServeConfig(
                policy="off", gamma_max=4, max_batch=NUM_ROWS, kv_memory_bytes=NUM_PAGES * self.page_bytes
            ),
        )
        assert self.loaded.elastic is not None
        self.elastic = self.loaded.elastic
        self.prompt = pair.tokenizer.encode(TEXT)
        self._expected: dict[tuple[int, int, int, int | None], list[int]] = {}

    def batcher(self, policy: BatchPolicy, *, persist_steps: int = 2) -> Batcher:
        loaded = self.loaded
        memory = self.elastic.memory
        if memory.state is MemoryState.LENT:
            memory.begin_return_()
        memory.finish_()
        for page in range(NUM_PAGES):
            # only what is written again may be read
            self.elastic.target.storage_PL2GSF[page] = float("nan")
        pool = pool_over(loaded, NUM_PAGES, NUM_ROWS)
        elastic = ElasticMemory(
            pool, self.elastic.target, memory, low_pages=LOW_PAGES, persist_steps=persist_steps
        )
        return Batcher(
            loaded.target,
            loaded.draft,
            pool,
            policy,
            tokenizer=loaded.tokenizer,
            max_context=loaded.max_context,
            gamma_max=4,
            eos_tokens=loaded.eos_tokens,
            elastic=elastic,
        )

    def client(self, length: int, num_tokens: int, *, start: int = 0, seed: int | None = None) -> Client:
        sampling = SamplingConfig()
        if seed is not None:
            sampling = SamplingConfig(temperature=0.8, top_p=0.9, seed=seed)
        config = GenerateConfig(max_new_tokens=num_tokens, sampling=sampling, ignore_eos=True)
        return Client(self.prompt[start : start + length], config)

    def expected(
        self, length: int, num_tokens: int, *, start: int = 0, seed: int | None = None
    ) -> list[int]:
        """The tokens that the engine emits for this request alone, without speculation."""
        key = length, num_tokens, start, seed
        if key not in self._expected:
            client = self.client(length, num_tokens, start=start, seed=seed)
            steps = self.pair.engine.generate(client.prompt, plain_policy(), client.config)
            self._expected[key] = [token for result in steps for token in result.tokens]
        return self._expected[key]


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> ElasticBench:
    return ElasticBench(tiny)


def elastic_of(batcher: Batcher) -> ElasticMemory:
    assert batcher.elastic is not None
    return batcher.elastic


def test_the_draft_s_memory_is_the_tail_of_the_pool_s_storage(bench: ElasticBench) -> None:
    storage = bench.elastic.target.storage_PL2GSF
    memory = bench.elastic.memory
    begin = storage[NUM_PAGES].data_ptr()
    end = storage.data_ptr() + storage.nbytes
    assert bench.elastic.draft_pages >= 1
    assert all(
        begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end
        for tensor in memory.weights.values()
    )
    assert memory.num_bytes == weight_bytes(memory.weights)
    assert memory.num_bytes <= end - begin < memory.num_bytes + storage[0].nbytes


def test_expansion_waits_for_lasting_scarcity_without_speculation(bench: ElasticBench) -> None:
    elastic = elastic_of(bench.batcher(Schedule([0]), persist_steps=3))
    elastic.pool.extend_(0, 16 * (NUM_PAGES - LOW_PAGES + 1))  # two pages are free, tau_low is three
    # a step with speculation restarts the count
    for gamma, is_in in ((0, True), (0, True), (1, True), (0, True), (0, True), (0, False)):
        elastic.advance_(gamma=gamma, num_waiting=5)
        assert elastic.is_draft_in == is_in
    assert elastic.pool.num_pages == NUM_PAGES + elastic.draft_pages
    assert elastic.pool.num_free == 2 + elastic.draft_pages


def test_contraction_waits_for_an_empty_queue_and_free_pages(bench: ElasticBench) -> None:
    elastic = elastic_of(bench.batcher(Schedule([0])))
    elastic.expand_()
    pages = NUM_PAGES - LOW_PAGES
    elastic.pool.extend_(0, 16 * pages)
    elastic.advance_(gamma=0, num_waiting=0)
    assert elastic.memory.state is MemoryState.LENT  # exactly S_draft + tau_low pages are free, not more
    elastic.pool.release_(0)
    elastic.pool.extend_(0, 16 * (pages - 1))
    elastic.advance_(gamma=0, num_waiting=1)
    assert elastic.memory.state is MemoryState.LENT
    elastic.advance_(gamma=0, num_waiting=0)
    assert elastic.memory.state is MemoryState.RETURNING
    assert elastic.pool.num_pages == NUM_PAGES
    elastic.settle_()
    assert elastic.is_draft_in


def test_a_contraction_that_does_not_fit_changes_nothing(bench: ElasticBench) -> None:
    elastic = elastic_of(bench.batcher(Schedule([0])))
    elastic.expand_()
    elastic.pool.extend_(0, 16 * (NUM_PAGES + 1))
    table = elastic.pool.table_BP.clone()
    with pytest.raises(CapacityError, match="1 needed, 0 free"):
        elastic.contract_()
    assert torch.equal(elastic.pool.table_BP, table)
    assert elastic.pool.num_pages == NUM_PAGES + elastic.draft_pages
    assert elastic.memory.state is MemoryState.LENT
    elastic.pool.check()


def test_the_draft_comes_back_complete_and_in_chunks(
    bench: ElasticBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(draft_memory.CHUNK_BYTES, "cpu", 5000)
    weights = load_draft_weights(bench.pair.bundle, "cpu")
    storage = torch.zeros(weight_bytes(weights) + 64, dtype=torch.uint8)
    memory = DraftMemory(weights, storage[-storage.data_ptr() % 64 :])
    complete = digest(memory)
    assert all(
        torch.equal(memory.weights[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in weights.items()
        if tensor.dim()
    )
    memory.leave_()
    storage.fill_(0xFF)
    memory.begin_return_()
    steps = 0
    while memory.state is MemoryState.RETURNING:
        assert digest(memory) != complete
        memory.advance_()
        steps += 1
    assert steps >= memory.num_bytes // 5000
    assert digest(memory) == complete


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_draft_comes_back_on_a_separate_stream_after_earlier_work(tiny: LoadedPair) -> None:
    weights = load_draft_weights(tiny.bundle, "cpu")
    memory = DraftMemory(weights, torch.zeros(weight_bytes(weights), dtype=torch.uint8, device="cuda"))
    memory.leave_()
    for tensor in memory.weights.values():
        tensor.zero_()  # the pages' last writes
    memory.begin_return_()
    memory.finish_()
    assert all(torch.equal(memory.weights[name].cpu(), tensor) for name, tensor in weights.items())


def test_speculation_stops_while_the_draft_is_away_and_then_continues(bench: ElasticBench) -> None:
    """Scarce pages and gamma = 0 lend the memory; when the queue is empty, the draft comes back."""
    batcher = bench.batcher(Schedule([0] * 12 + [3]))
    elastic = elastic_of(batcher)
    complete = digest(bench.elastic.memory)
    sizes = ((40, 40), (30, 60), (50, 25), (20, 90))
    clients = [bench.client(*size, start=7 * index) for index, size in enumerate(sizes)]
    submit(batcher, *clients)
    seen = set()
    while (report := batcher.step()) is not None:
        batcher.scheduler.check()
        state = elastic.memory.state
        seen.add((state, any(report.drafted)))
        assert report.is_draft_in == (state is MemoryState.RESIDENT)
        assert report.num_pages == NUM_PAGES + (elastic.draft_pages if state is MemoryState.LENT else 0)
    assert {(MemoryState.LENT, False), (MemoryState.RESIDENT, True)} <= seen
    assert not {(MemoryState.LENT, True), (MemoryState.RETURNING, True)} & seen
    assert elastic.trace.count == {"expand": 1, "contract": 1, "dispatch reload": 1}
    assert digest(elastic.memory) == complete
    for index, (each, size) in enumerate(zip(clients, sizes, strict=True)):
        assert each.tokens == bench.expected(*size, start=7 * index)


def test_contraction_moves_lent_pages_with_their_text(bench: ElasticBench) -> None:
    """A prompt in lent pages is shared, moved and shared again; its rows get the same tokens."""
    batcher = bench.batcher(Schedule([0]), persist_steps=10**6)
    elastic = elastic_of(batcher)
    first = bench.client(70, 8, start=3)
    second = bench.client(70, 20, start=3)
    third = bench.client(70, 4, start=3)
    elastic.expand_()
    elastic.pool.extend_(3, 16 * NUM_PAGES)  # only lent pages are left
    submit(batcher, first)
    while not first.tokens:
        batcher.step()
    submit(batcher, second)
    batcher.step()
    assert int(elastic.pool.table_BP[0, 0]) >= NUM_PAGES
    assert torch.equal(elastic.pool.table_BP[0, :4], elastic.pool.table_BP[1, :4])  # shared
    elastic.pool.release_(3)
    before = elastic.target.storage_PL2GSF[elastic.pool.table_BP[0, :4].long()].clone()
    elastic.contract_()
    elastic.pool.check()
    assert int(elastic.pool.table_BP.max()) < NUM_PAGES
    assert torch.equal(elastic.pool.table_BP[0, :4], elastic.pool.table_BP[1, :4])
    assert torch.equal(elastic.target.storage_PL2GSF[elastic.pool.table_BP[0, :4].long()], before)
    submit(batcher, third)
    run(batcher)
    assert elastic.is_draft_in
    for client, num_tokens in ((first, 8), (second, 20), (third, 4)):
        assert client.tokens == bench.expected(70, num_tokens, start=3)


def test_a_request_that_needs_lent_pages_is_refused(bench: ElasticBench) -> None:
    batcher = bench.batcher(Schedule([0]))
    elastic_of(batcher).expand_()
    with pytest.raises(CapacityError, match=f"{NUM_PAGES + 1} needed, {NUM_PAGES} free"):
        batcher.ticket(bench.client(50, 16 * NUM_PAGES - 49).request())


WORKLOADS = st.fixed_dictionaries(
    {
        "gammas": st.lists(st.integers(0, 4), min_size=1, max_size=30),
        "forced": st.lists(
            st.sampled_from((None, "expand", "contract", "settle")), min_size=1, max_size=60
        ),
        "requests": st.lists(
            st.tuples(
                st.integers(1, 90),  # prompt
                st.integers(1, 30),  # tokens
                st.sampled_from((0, 0, 7)),  # where its prompt begins
                st.sampled_from((None, 5)),  # seed
                st.integers(0, 20),  # arrives at step
                st.sampled_from((None, None, 4)),  # cancelled this many steps later
            ),
            min_size=1,
            max_size=8,
        ),
    }
)


def force(elastic: ElasticMemory, action: str | None) -> None:
    """Do what the triggers would not do now; a contraction that does not fit does nothing."""
    state = elastic.memory.state
    if action == "expand" and state is MemoryState.RESIDENT:
        elastic.expand_()
        # lent pages are taken first, so that a contraction has to move them
        pool = elastic.pool
        queue = sorted(pool._free, key=lambda page: (pool._has_text(page), -page))
        pool._free = OrderedDict.fromkeys(queue)
    if action == "settle" and state is MemoryState.RETURNING:
        elastic.settle_()
    if action == "contract" and state is MemoryState.LENT:
        try:
            elastic.contract_()
        except CapacityError:
            assert elastic.memory.state is MemoryState.LENT


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(WORKLOADS)
def test_any_expansions_and_contractions_leave_texts_unchanged(
    bench: ElasticBench, workload: dict[str, list[tuple[int, ...]]]
) -> None:
    batcher = bench.batcher(Schedule(workload["gammas"]))  # type: ignore[arg-type]
    elastic = elastic_of(batcher)
    forced = list(workload["forced"])
    complete = digest(elastic.memory)
    requests = workload["requests"]
    clients = [
        bench.client(length, count, start=start, seed=seed) for length, count, start, seed, *_ in requests
    ]
    tickets = {}
    for now in range(2000):
        for index, (*_, arrival, cancelled_after) in enumerate(requests):
            if arrival == now:
                tickets[index] = batcher.ticket(clients[index].request())
                batcher.submit(tickets[index])
            if cancelled_after is not None and arrival + cancelled_after == now:
                batcher.cancel(tickets[index])
        force(elastic, forced[now % len(forced)])  # type: ignore[arg-type]
        batcher.scheduler.check()
        is_idle = batcher.step() is None
        batcher.scheduler.check()
        num_lent = elastic.draft_pages if elastic.memory.state is MemoryState.LENT else 0
        assert elastic.pool.num_pages == NUM_PAGES + num_lent
        assert elastic.memory.state is not MemoryState.RESIDENT or digest(elastic.memory) == complete
        if is_idle and now > 40:
            break
    assert all(ticket.is_finished for ticket in tickets.values()), "a request is stuck"
    assert elastic.is_draft_in
    for client, (length, count, start, seed, *_) in zip(clients, requests, strict=True):
        expected = bench.expected(length, count, start=start, seed=seed)
        assert client.tokens == expected[: len(client.tokens)]
        assert client.finish == "cancelled" or client.tokens == expected
