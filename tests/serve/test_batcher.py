"""Many requests at once: every request gets the text that it would get alone.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import Bench, Client, Schedule, run, submit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.errors import CapacityError, ConfigError
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.protocol import BatchPolicy, Load, Outcome
from yggdrasil.serve.request import Observer, RequestReport, StepReport
from yggdrasil.serve.ticket import token_log_probs
from yggdrasil.step.choice import Choice

TEXT = (
    "Once upon a time there was a red fox named Tom. Tom liked to run in the forest. "
    "One day Tom saw a small owl near the river."
)


@pytest.fixture(scope="module")
def bench(tiny: LoadedPair) -> Bench:
    return Bench(tiny)


def client(
    bench: Bench,
    length: int,
    num_tokens: int,
    *,
    seed: int | None = None,
    start: int = 0,
    **options: object,
) -> Client:
    """A request to continue `length` tokens of the text, from `start` on."""
    tokens = bench.pair.tokenizer.encode(TEXT * 3)
    sampling = SamplingConfig() if seed is None else SamplingConfig(temperature=0.8, top_p=0.9, seed=seed)
    config = GenerateConfig(max_new_tokens=num_tokens, sampling=sampling, ignore_eos=True)
    return Client(tokens[start : start + length], config, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", (0, 1, 3, 4, 8))
def test_rows_get_the_tokens_that_they_get_alone(bench: Bench, gamma: int) -> None:
    batcher = bench.batcher(Schedule([gamma]))
    clients = [
        client(bench, 3 + 17 * index, 20 + index, seed=None if index % 2 else index) for index in range(6)
    ]
    submit(batcher, *clients)
    run(batcher)
    for each in clients:
        assert each.tokens == bench.reference(each)
        assert each.finish == "length"


@pytest.mark.parametrize("gamma", (0, 3))
def test_a_step_is_one_call_unless_a_prompt_runs_along(
    bench: Bench, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = bench.batcher(Schedule([gamma]))
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        call = getattr(batcher.stepper, name)

        def wrapped(*arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        return wrapped

    for name in ("run", "draft", "verify"):
        monkeypatch.setattr(batcher.stepper, name, recorded(name))
    first = client(bench, 40, 12)
    submit(batcher, first)
    report = batcher.step()
    assert report is not None
    assert report.prompt_tokens > 0
    assert calls[:2] == ["draft", "verify"]
    run(batcher)
    num_prompt_calls = calls.index("run")
    assert set(calls[num_prompt_calls:]) == {"run"}
    assert set(calls[:num_prompt_calls]) == {"draft", "verify"}
    assert first.tokens == bench.reference(first)


def test_drafts_are_both_accepted_and_rejected_in_these_tests(bench: Bench) -> None:
    """Without this the other tests would check little."""
    batcher = bench.batcher(Schedule([4]))
    submit(batcher, *(client(bench, 5 + index, 30) for index in range(4)))
    accepted = []
    while (report := batcher.step()) is not None:
        rows = zip(report.emitted, report.drafted, strict=True)
        accepted += [emitted - 1 for emitted, drafted in rows if drafted == 4]
    assert {0, 4} <= set(accepted)


def test_a_policy_that_selects_drafts_may_draft_deeper_than_the_menu_verifies(bench: Bench) -> None:
    """8 rows with 4 drafts are 40 tokens, more than the largest graph has: 32.

    A fixed length drafts 3 per row; a policy that selects drafts 4 and verifies 24 of the batch.
    """

    def deepest(policy: BatchPolicy) -> tuple[int, int]:
        batcher = bench.batcher(policy)
        steps = []
        submit(batcher, *(client(bench, 5 + index, 60) for index in range(8)))
        while (report := batcher.step()) is not None:
            steps += [(report.gamma, sum(report.drafted))] if report.batch_size == 8 else []
        return max(steps)

    assert deepest(FixedGamma(4)) == (3, 24)
    assert deepest(Schedule([4])) == (4, 24)


class Grafting(Schedule):
    """Grafts on every tree."""

    def choose(self, load: Load) -> Choice:
        choice = super().choose(load)
        shapes = tuple(replace(shape, graft=3) if shape.depth else shape for shape in choice.shapes)
        return replace(choice, shapes=shapes)


@pytest.mark.parametrize("seed", (None, 3))
def test_rows_with_grafts_get_the_tokens_that_they_get_alone(bench: Bench, seed: int | None) -> None:
    """Prompts repeat; rows join one after another, and one leaves."""
    batcher = bench.batcher(Grafting([4, 2, 0]))
    clients = [client(bench, 20 + 9 * index, 30 + index, seed=seed) for index in range(5)]
    tickets = [batcher.ticket(each.request()) for each in clients]
    for ticket in tickets:
        batcher.submit(ticket)
        batcher.step()
        batcher.scheduler.check()
    batcher.cancel(tickets[1])
    run(batcher)
    for each in clients:
        reference = bench.reference(each)
        assert each.tokens == reference[: len(each.tokens)]
        assert (each.finish == "cancelled") == (each is clients[1])


SCHEDULES = st.fixed_dictionaries(
    {
        "gammas": st.lists(st.integers(0, 4), min_size=1, max_size=30),
        "budgets": st.lists(st.integers(0, 32), min_size=1, max_size=10),
        "num_pages": st.integers(9, 40),
        "num_rows": st.integers(1, 4),
        "requests": st.lists(
            st.tuples(
                st.integers(1, 100),  # prompt
                st.integers(1, 30),  # tokens
                st.sampled_from((None, 0, 2)),  # speculation
                st.sampled_from((None, 5, 6)),  # seed
                st.integers(0, 12),  # arrives at step
                st.sampled_from((None, None, 3, 9)),  # cancelled this many steps later
                st.sampled_from((0, 0, 7)),  # where its prompt begins
            ),
            min_size=1,
            max_size=7,
        ),
    }
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(SCHEDULES)
def test_any_schedule_gives_the_same_texts_and_loses_no_page(
    bench: Bench, schedule: dict[str, list[int]]
) -> None:
    """Gamma changes, drafts are left out, rows are cancelled and preempted, prompts shared or scored."""
    batcher = bench.batcher(
        Schedule(schedule["gammas"], schedule["budgets"]),
        num_pages=schedule["num_pages"],
        num_rows=schedule["num_rows"],
    )  # type: ignore[arg-type]
    clients = [
        client(bench, prompt, tokens, seed=seed, start=start, speculation=cap)
        for prompt, tokens, cap, seed, _, _, start in schedule["requests"]
    ]
    for each in clients[::2]:
        each.prompt_top = 1
    arrivals = {index: request[4] for index, request in enumerate(schedule["requests"])}
    cancelled = {
        index: request[4] + request[5]
        for index, request in enumerate(schedule["requests"])
        if request[5] is not None
    }
    tickets = {}
    for step in range(2000):
        for index in [index for index, at in arrivals.items() if at == step]:
            tickets[index] = batcher.ticket(clients[index].request())
            batcher.submit(tickets[index])
        for index in [index for index, at in cancelled.items() if at == step]:
            batcher.cancel(tickets[index])
        if batcher.step() is None and step > 25:
            break
        batcher.scheduler.check()
    for index, each in enumerate(clients):
        reference = bench.reference(each)
        if each.finish == "cancelled":
            assert index in cancelled
            assert each.tokens == reference[: len(each.tokens)]
        else:
            assert (each.tokens, each.finish) == (reference, "length")
            scored = [score.token for score in each.events[0].prompt_log_probs]
            assert scored == ([] if each.prompt_top is None else each.prompt[1:])


def test_the_youngest_row_is_computed_again_when_pages_run_out(bench: Bench) -> None:
    finished: list[RequestReport] = []

    class Listener(Observer):
        def on_finish(self, report: RequestReport) -> None:
            finished.append(report)

    batcher = bench.batcher(Schedule([2]), num_pages=12)
    batcher.observer = Listener()
    clients = [client(bench, 30 + index, 60, start=index) for index in range(4)]
    submit(batcher, *clients)
    run(batcher)
    assert sum(report.preemptions for report in finished) > 0
    texts = [each.tokens for each in clients]
    lasts = [each.events.pop().report for each in clients]
    assert sorted(map(id, lasts)) == sorted(map(id, finished))  # a client gets the report of its request
    assert {event.report for each in clients for event in each.events} == {None}
    assert texts == [bench.reference(each) for each in clients]


def test_a_row_with_a_grammar_has_the_text_that_it_has_alone(bench: Bench) -> None:
    """It is preempted, drafts in a batch with rows without one, and ends where the grammar does."""
    schema = {"type": "array", "items": {"enum": ["red", "old"]}, "minItems": 6, "maxItems": 6}
    grammar = GrammarConfig.of("json", schema)
    batcher = bench.batcher(Schedule([2, 4, 0, 3]), num_pages=12)
    clients = [client(bench, 30 + index, 60, start=index) for index in range(4)]
    for each in clients[1:]:
        options = {"grammar": grammar, "temperature": 0.8, "seed": 5}
        each.config = replace(each.config, ignore_eos=False, sampling=SamplingConfig.of(options))
    tickets = [batcher.ticket(each.request()) for each in clients]
    for ticket in tickets:
        batcher.submit(ticket)
    run(batcher)
    assert sum(ticket.preemptions for ticket in tickets) > 0
    assert [each.tokens for each in clients] == [bench.reference(each) for each in clients]
    finished = [each.text for each in clients[1:] if each.finish == "stop"]
    assert finished
    assert all({*json.loads(text)} <= {"red", "old"} for text in finished)


def test_a_grammar_that_fails_ends_its_own_row_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yggdrasil.text.grammar.LIMITS", {"step_max_items": 8, "verbose_errors": False})
    source = 'start: "$" a\na: | a a | /[a-z ]/ a /[a-z ]/ | /[ -~]/'
    batcher = bench.batcher(Schedule([2]))
    clients = [client(bench, 30 + index, 20, start=index) for index in range(2)]
    sampling = SamplingConfig.of({"grammar": GrammarConfig.of("grammar", source)})
    clients[0].config = replace(clients[0].config, ignore_eos=False, sampling=sampling)
    submit(batcher, *clients)
    run(batcher)
    assert clients[0].finish == "error"
    assert "too complex" in clients[0].events[-1].error
    assert clients[1].tokens == bench.reference(clients[1])


def test_equal_prompts_share_their_full_pages(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]))
    clients = [client(bench, 50, 10) for _ in range(3)]
    first = batcher.ticket(clients[0].request())
    batcher.submit(first)
    while first.row is None or not first.row.is_prefilled:
        batcher.step()
    used = batcher.pool.num_pages - batcher.pool.num_free
    tickets = [batcher.ticket(each.request()) for each in clients[1:]]
    for ticket in tickets:
        batcher.submit(ticket)
    report = batcher.step()
    assert report is not None
    assert [ticket.shared_tokens for ticket in tickets] == [48, 48]
    # each takes a page for its last two tokens
    assert batcher.pool.num_pages - batcher.pool.num_free == used + 2
    assert report.prompt_tokens == 2  # the two before the roots
    run(batcher)
    assert clients[0].tokens == clients[1].tokens == clients[2].tokens == bench.reference(clients[0])


def test_the_kv_of_a_finished_request_can_be_shared_for_target_and_draft(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([3]))
    clients = [client(bench, 64, 12) for _ in range(2)]
    for each in clients:
        ticket = batcher.ticket(each.request())
        batcher.submit(ticket)
        batcher.step()
        draft_len = ticket.running.draft_len if each is clients[1] else 0
        run(batcher)
    assert draft_len == 48
    assert clients[1].tokens == bench.reference(clients[1])


def test_acceptance_is_the_same_after_200_steps_without_the_draft(bench: Bench) -> None:
    """The draft's KV catches up, so its guesses are those of a draft that reads the text as a prompt."""

    def decoded(asking: Client, gammas: list[int]) -> list[tuple[int, ...]]:
        batcher = bench.batcher(Schedule(gammas))
        submit(batcher, asking)
        emitted = []
        while (report := batcher.step()) is not None:
            emitted += [report.emitted] if report.emitted else []  # a step of a long prompt emits nothing
        assert asking.tokens == bench.reference(asking)
        return emitted

    whole = client(bench, 5, 245)
    # the first token comes with the prompt, whose step selects no gamma
    paused = decoded(whole, [*[0] * 200, 4])
    assert paused[:201] == [(1,)] * 201
    rest = Client([*whole.prompt, *whole.tokens[:200]], GenerateConfig(max_new_tokens=45, ignore_eos=True))
    unpaused = decoded(rest, [4])
    assert unpaused[1:] == paused[201:]
    assert max(unpaused[1:]) == (5,)


def test_log_probabilities_are_those_of_plain_decoding(bench: Bench) -> None:
    log_probs = {}
    for gamma in (0, 4):
        asking = client(bench, 9, 16, num_top=3)
        batcher = bench.batcher(Schedule([gamma]))
        submit(batcher, asking)
        run(batcher)
        log_probs[gamma] = [entry for event in asking.events for entry in event.log_probs]
    assert log_probs[0] == log_probs[4]
    for entry in log_probs[0]:
        assert (entry.token, entry.log_prob) == entry.top[0]  # greedy
        assert len(entry.top) == 3


def test_only_the_row_with_broken_logits_ends(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([2]))
    clients = [client(bench, 6 + index, 12) for index in range(3)]
    submit(batcher, *clients)
    batcher.step()
    batcher.step()
    key, _ = batcher.target.cache.layer(0)
    key[batcher.pool.table_BP[1, 0]] = torch.nan  # the first page of the second row
    run(batcher)
    assert [each.finish for each in clients] == ["length", "error", "length"]
    assert "not finite" in clients[1].events[-1].error
    assert clients[0].tokens == bench.reference(clients[0])
    assert clients[2].tokens == bench.reference(clients[2])


def test_a_stop_text_ends_a_row_and_is_not_returned(bench: Bench) -> None:
    whole = client(bench, 5, 40)
    reference = bench.pair.tokenizer.decode(bench.reference(whole))
    stop = reference[20:26]
    asking = Client(whole.prompt, GenerateConfig(max_new_tokens=40, ignore_eos=True, stop=(stop,)))
    batcher = bench.batcher(Schedule([4]))
    reports: list[StepReport] = []
    submit(batcher, asking)
    while (report := batcher.step()) is not None:
        reports.append(report)
    assert asking.text == reference[: reference.index(stop)]
    assert asking.finish == "stop"
    assert sum(report.returned_tokens for report in reports) == len(asking.tokens)
    # the last chain went beyond the stop text
    assert sum(sum(report.emitted) for report in reports) > len(asking.tokens)


def test_an_outcome_contains_the_prompt_tokens_of_its_step(bench: Bench) -> None:
    outcomes: list[Outcome] = []

    class Listening(Schedule):
        def observe(self, outcome: Outcome) -> None:
            outcomes.append(outcome)

    batcher = bench.batcher(Listening([2]))
    submit(batcher, client(bench, 5, 60))
    batcher.step()  # its prompt
    batcher.step()
    assert [(outcome.load.batch_size, outcome.is_timed) for outcome in outcomes] == [(1, True)]
    submit(batcher, client(bench, 90, 12, start=3))
    report = batcher.step()  # decodes, and computes the prompt of the other
    assert report is not None
    assert outcomes[-1].load.waiting_tokens == min(90, batcher.target.prefill_chunk)
    assert outcomes[-1].prompt_tokens == report.prompt_tokens
    assert not outcomes[-1].is_timed
    assert len(outcomes[-1].emitted) == 1  # the prompt's row does not decode yet
    run(batcher)
    assert any(outcome.load.batch_size == 2 for outcome in outcomes)
    assert all(sum(outcome.emitted) and outcome.seconds > 0 for outcome in outcomes)


def test_a_request_that_cannot_be_served_is_refused_before_it_waits(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([0]), num_pages=4)
    with pytest.raises(ConfigError, match="at least one token"):
        batcher.ticket(client(bench, 0, 5).request())
    with pytest.raises(ConfigError, match="at most 252"):
        batcher.ticket(client(bench, 4, 300).request())
    with pytest.raises(ConfigError, match="token ids from 0 to 383"):
        batcher.ticket(Client([5, 384], GenerateConfig()).request())
    with pytest.raises(CapacityError, match="5 needed, 4 free"):
        batcher.ticket(client(bench, 60, 20).request())
    assert batcher.num_waiting == 0


@pytest.mark.parametrize("gammas", ([0], [3]))
def test_log_probabilities_of_a_prompt_are_those_of_its_generation(bench: Bench, gammas: list[int]) -> None:
    batcher = bench.batcher(Schedule(gammas))
    written = client(bench, 40, 30)
    written.num_top = 3
    others = [client(bench, 20 + index, 25, start=index) for index in range(2)]
    submit(batcher, written, *others)
    run(batcher)
    scores = [score for event in written.events for score in event.log_probs]
    # longer than a forward, and its pages are known from before
    reading = client(bench, 0, 8)
    reading.prompt = [*written.prompt, *written.tokens]
    reading.prompt_top = 3
    again = [client(bench, 20 + index, 25, start=index) for index in range(2)]
    submit(batcher, again[0], reading, again[1])
    run(batcher)
    assert len(reading.prompt) > batcher.target.prefill_chunk
    first, *rest = reading.events
    assert [score.token for score in first.prompt_log_probs] == reading.prompt[1:]
    assert list(first.prompt_log_probs[-30:]) == scores
    assert all(event.prompt_log_probs == () for event in rest)
    assert reading.tokens == bench.reference(reading)
    assert [each.tokens for each in again] == [each.tokens for each in others]


def test_rows_that_wait_for_the_log_probabilities_of_their_prompts_survive_preemption(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([2]), num_pages=12)
    clients = [client(bench, 30 + index, 60, start=index) for index in range(4)]
    for each in clients:
        each.prompt_top = 0
    submit(batcher, *clients)
    run(batcher)
    for each in clients:
        assert len(each.events[0].prompt_log_probs) == len(each.prompt) - 1
        assert each.tokens == bench.reference(each)


def test_a_rank_counts_the_likelier_tokens() -> None:
    logits_NV = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    scores = token_log_probs([2, 0], logits_NV, 1)
    assert [score.rank for score in scores] == [2, 1]
    assert [score.top[0][0] for score in scores] == [1, 0]
    assert scores[0].log_prob == float(logits_NV.log_softmax(-1)[0, 2])


def test_only_a_request_that_asks_gets_the_tree_of_every_step(bench: Bench) -> None:
    batcher = bench.batcher(Schedule([3]))
    asking = client(bench, 20, 24, trees=True)
    other = client(bench, 30, 24)
    submit(batcher, asking, other)
    run(batcher)
    assert not any(event.tree for event in other.events)
    assert asking.tokens == bench.reference(asking)
    root = asking.prompt[-1]
    drafted = 0
    for event in asking.events:
        tree = event.tree
        assert tree is not None
        assert tree.tokens[0] == root
        assert [tree.tokens[node] for node in tree.path[1:]] == list(event.tokens)[: len(tree.path) - 1]
        assert len(tree.tokens) == len(tree.parents) == len(tree.log_probs) <= tree.drafted
        drafted += tree.drafted - 1
        root = event.tokens[-1]
    assert drafted > 0
