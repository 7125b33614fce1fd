"""The step over rows together against the same step of each row alone, over a cache of its own: equal
results, equal bits in both caches.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pretend
import pytest
import tiny_pair
import torch
from torch import Tensor

from yggdrasil.bundle import Bundle
from yggdrasil.config import SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ShapeNotCompiled
from yggdrasil.loading import load_draft, load_draft_weights, load_models, load_target, paged_storage
from yggdrasil.models.packing import Chunk, pack_chain_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.page_order import by_slot
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.shape import FixedShape
from yggdrasil.policy.stopping import LowConfidence, SmallGain
from yggdrasil.policy.uncalibrated import UNCALIBRATED, plain_policy
from yggdrasil.schedule.profile import PROBES
from yggdrasil.schedule.search import plans
from yggdrasil.state import PLAIN, DecodeState, Row, Shape, StepResult
from yggdrasil.step import rows as rows_module
from yggdrasil.step.ahead import run_tails
from yggdrasil.step.choice import Calibration, Choice, VerifyMenu
from yggdrasil.step.growth import RowDraft, prefill
from yggdrasil.step.plan import SEQUENTIAL, Plan
from yggdrasil.step.platt import PlattScale
from yggdrasil.step.rows import StepOverRows
from yggdrasil.step.sampling import gumbel_noise
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

PROMPTS = (
    "Once upon a time",
    "Tom",
    "One day Lily saw a red fox near the café.",
    "Zoë liked to sing in the garden.",
)
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, seed=7)
FILTERED = SamplingConfig(temperature=0.9, top_k=20, top_p=0.9, seed=3)
NUM_TOKENS = 40
NUM_ROWS = 4
NUM_STEPS = 8
EVERYTHING = VerifyMenu((10**6,), (1.0,))
LEVELS = (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))


class TwoDeep:
    """A stop rule that exists only in Python."""

    numbers = None

    def enough(self, tree: TokenTree) -> bool:
        return int(tree.depth_N.max()) >= 2


# four rows of 8 nodes fill the largest graph
SHAPES = {
    "tree": Shape(4, 4, 8),
    "shallow tree": Shape(4, 1, 16),
    "chain": Shape(1, 4),
    "chain of a set K": Shape(1, 3, 2),
    "plain": PLAIN,
    "growth that stops": Shape(4, 4, 8, stop=SmallGain(4, (0.0, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3), 0.4)),
    "chain that stops": Shape(1, 4, 5, stop=LowConfidence(0.5)),
    "a rule of Python's": Shape(4, 3, 8, stop=TwoDeep()),
    "static": Shape(3, 3, 8, LEVELS),
}


@dataclass(kw_only=True)
class Alone(FixedShape):
    """Cycles through shapes by the length of the text, and verifies every node that a shape allows."""

    shapes: tuple[Shape, ...]
    first: int

    def shape_of(self, rows: Sequence[Row]) -> Shape:
        return self.shapes[(self.first + rows[0].state.root_pos) % len(self.shapes)]

    def choose(self, rows: Sequence[Row]) -> Choice:
        return Choice((self.shape_of(rows),), (self.acceptance.calibration,), EVERYTHING)


class Paged(NamedTuple):
    """Both models over rows whose pages are in no order."""

    target: TokenGraphs
    draft: TokenGraphs


@pytest.fixture(scope="module")
def paged(tiny_bundle: Bundle) -> Paged:
    num_pages = NUM_ROWS * tiny_bundle.kv_target.num_pages
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    pages_BP = order.view(NUM_ROWS, -1)
    target = paged_storage(tiny_bundle, tiny_bundle.kv_target, pages_BP, num_pages)
    draft = paged_storage(tiny_bundle, tiny_bundle.kv_draft, pages_BP, num_pages)
    weights = load_draft_weights(tiny_bundle, "cpu")
    return Paged(load_target(tiny_bundle, target), load_draft(tiny_bundle, draft, weights))


@pytest.fixture(scope="module")
def engine(tiny_bundle: Bundle) -> Engine:
    """The specification over the only row of each cache."""
    target, draft = load_models(tiny_bundle)
    stepper = StepOverRows(target, draft, Trace())
    return Engine(target, draft, max_context=tiny_bundle.max_context, stepper=stepper)


class Flat(Trace):
    """A trace of stages that follow one another, so that their times may be added."""

    running = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        assert self.running == ""
        self.running = name
        with super().stage(name):
            yield
        self.running = ""


def record(state: DecodeState, result: StepResult, target_len: int, draft_len: int) -> tuple[Any, ...]:
    """Everything in a step's result except its time, and what it did to the request."""
    arrays = [array_N[: len(result.tree)].tolist() for array_N in result.tree.arrays]
    hidden = None if state.hidden_E is None else state.hidden_E.tolist()
    settled = replace(result, ms=0.0, parts=None, tree_of=None)  # type: ignore[arg-type]
    return settled, arrays, hidden, target_len, draft_len, state.root_pos


@dataclass
class Text:
    """A request decoded alone, step by step, with the KV that it leaves; then the same over rows."""

    policy: Alone
    tokens: Sequence[int]
    sampling: SamplingConfig
    history: list[tuple[Any, ...]] = field(default_factory=list)
    caches: list[Tensor] = field(default_factory=list)

    def decode_alone_(self, engine: Engine) -> None:
        state = DecodeState(list(self.tokens), self.sampling)
        for model in (engine.target, engine.draft):
            model.cache.rollback_(0)
            prefill(model, state.tokens[:-1])
        while state.num_emitted < NUM_TOKENS:
            result = engine.step(state, self.policy)
            self.history.append(record(state, result, engine.target.cache.len, engine.draft.cache.len))
        self.caches = [stored(model, 0, model.cache.len) for model in (engine.target, engine.draft)]

    def calibration(self) -> Calibration:
        return self.policy.acceptance.calibration


def stored(model: TokenGraphs, row: int, length: int) -> Tensor:
    """The keys and values of a row's first indices."""
    cache = model.cache
    slots = by_slot(cache.storage_PL2GSF[cache.pages_BP[row].long()]).permute(0, 4, 1, 2, 3, 5)
    return slots.flatten(0, 1)[:length]


def prefill_row_(paged: Paged, row: Row) -> None:
    """Run a row's text before its root through both models."""
    text = row.state.tokens[:-1]
    for model in paged:
        for start in range(0, len(text), model.prefill_chunk):
            part = text[start : start + model.prefill_chunk]
            meta_NM = model.meta(len(part))
            pack_chain_(meta_NM, part, start, row=row.row, num_read=0)
            model.forward(meta_NM)
    row.target_len = row.draft_len = len(text)


def choice_for(texts: Sequence[Text], rows: Sequence[Row], menu: VerifyMenu = EVERYTHING) -> Choice:
    shapes = tuple(text.policy.shape_of([row]) for text, row in zip(texts, rows, strict=True))
    return Choice(shapes, tuple(text.calibration() for text in texts), menu)


def trace_of(plan: Plan) -> Trace:
    return Trace() if plan.on_side else Flat()


def decode_together(
    paged: Paged, texts: Sequence[Text], plan: Plan = SEQUENTIAL
) -> list[list[tuple[Any, ...]]]:
    """Decode the texts as rows of one batch until each is done; returns the history of each."""
    step = StepOverRows(*paged, trace_of(plan), plan)
    rows = [Row(row, DecodeState(list(text.tokens), text.sampling)) for row, text in enumerate(texts)]
    for row in rows:
        prefill_row_(paged, row)
    histories: list[list[tuple[Any, ...]]] = [[] for _ in texts]
    while live := [place for place, row in enumerate(rows) if row.state.num_emitted < NUM_TOKENS]:
        running = [rows[place] for place in live]
        choice = choice_for([texts[place] for place in live], running)
        num_tokens = step.draft(running, choice)
        results = step.verify((), ())
        assert num_tokens == sum(result.verified for result in results)
        for place, result in zip(live, results, strict=True):
            row = rows[place]
            best = sorted(result.values, reverse=True)[: result.verified - 1]
            assert len(result.values) == result.drafted - 1
            assert 1 + sum(best) == pytest.approx(result.predicted_emitted)
            assert list(result.depths) == result.tree.depth_N.tolist()
            histories[place].append(record(row.state, result, row.target_len, row.draft_len))
    for row, text in zip(rows, texts, strict=True):
        lens = row.target_len, row.draft_len
        for model, length, alone in zip(paged, lens, text.caches, strict=True):
            # ahead of time the draft may also have run the last leaf of the path
            assert length == len(alone) or (plan.ahead and model is paged.draft and length > len(alone))
            assert torch.equal(stored(model, row.row, len(alone)), alone)
    return histories


def acceptance_of(pair: LoadedPair, *, is_scaled: bool, temperature: float) -> Acceptance:
    return pair.acceptance.nearest(temperature) if is_scaled else UNCALIBRATED


@pytest.mark.parametrize("is_scaled", (False, True), ids=("uncalibrated", "calibrated"))
@pytest.mark.parametrize(
    "samplings",
    ((GREEDY,) * 4, (SAMPLED,) * 4, (SAMPLED, GREEDY, FILTERED, GREEDY)),
    ids=("greedy", "sampled", "mixed"),
)
def test_each_row_equals_its_step_alone(
    tiny: LoadedPair, engine: Engine, paged: Paged, samplings: Sequence[SamplingConfig], is_scaled: bool
) -> None:
    texts = []
    for first, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True)):
        acceptance = acceptance_of(tiny, is_scaled=is_scaled, temperature=sampling.temperature)
        policy = Alone(PLAIN, acceptance, tiny.latency, (), shapes=tuple(SHAPES.values()), first=2 * first)
        texts.append(Text(policy, tiny.tokenizer.encode(prompt), sampling))
        texts[-1].decode_alone_(engine)
    assert decode_together(paged, texts) == [text.history for text in texts]


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: plan.name)
def test_no_plan_changes_the_results_of_rows(
    tiny: LoadedPair, engine: Engine, paged: Paged, plan: Plan
) -> None:
    """All but the length of the draft's KV, which a tail that ran ahead of time makes longer."""
    texts = []
    for first, (prompt, sampling) in enumerate(
        zip(PROMPTS, (SAMPLED, GREEDY, FILTERED, GREEDY), strict=True)
    ):
        acceptance = acceptance_of(tiny, is_scaled=True, temperature=sampling.temperature)
        policy = Alone(PLAIN, acceptance, tiny.latency, (), shapes=tuple(SHAPES.values()), first=2 * first)
        texts.append(Text(policy, tiny.tokenizer.encode(prompt), sampling))
        texts[-1].decode_alone_(engine)
    is_longer = False
    for together, text in zip(decode_together(paged, texts, plan), texts, strict=True):
        for found, expected in zip(together, text.history, strict=True):
            assert (*found[:4], found[5]) == (*expected[:4], expected[5])
            is_longer = is_longer or found[4] > expected[4]
    assert is_longer == ("tail" in plan.ahead)


@pytest.mark.parametrize("name", SHAPES)
def test_a_single_request_is_a_batch_of_one(
    tiny: LoadedPair, engine: Engine, paged: Paged, name: str
) -> None:
    policy = Alone(PLAIN, tiny.acceptance.nearest(0.0), tiny.latency, (), shapes=(SHAPES[name],), first=0)
    text = Text(policy, tiny.tokenizer.encode(PROMPTS[2]), GREEDY)
    text.decode_alone_(engine)
    assert decode_together(paged, [text]) == [text.history]


def test_rows_move_kept_nodes(tiny: LoadedPair, engine: Engine) -> None:
    """Without this, the equalities above would prove little about commits."""
    policy = Alone(PLAIN, tiny.acceptance.nearest(0.0), tiny.latency, (), shapes=(SHAPES["tree"],), first=0)
    paths = []
    for prompt in PROMPTS:
        text = Text(policy, tiny.tokenizer.encode(prompt), GREEDY)
        text.decode_alone_(engine)
        paths += [result.path for result, *_ in text.history]
    assert any(path != list(range(len(path))) for path in paths)


def plain_text(
    engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, num_tokens: int
) -> list[int]:
    """The prompt and what the engine writes after it without a draft."""
    state = DecodeState(list(prompt), sampling)
    engine.target.cache.rollback_(0)
    prefill(engine.target, state.tokens[:-1])
    while state.num_emitted < num_tokens:
        engine.step(state, plain_policy())
    return state.tokens


@pytest.mark.parametrize("plan", (SEQUENTIAL, PROBES[2], PROBES[-1]), ids=lambda plan: plan.name)
def test_rows_join_while_others_decode_and_prompts_run_in_the_same_forward(
    tiny: LoadedPair, engine: Engine, paged: Paged, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 joins with its whole prompt; row 2's prompt comes in two parts; both drafts lag by it then.

    A tail on "side" is slow, so rows join while it runs.
    """
    tail_ran = threading.Event()

    def slow_tails(*arguments: Any) -> list[RowDraft]:
        drafts = run_tails(*arguments)
        tail_ran.set()
        time.sleep(0.01)
        return drafts

    monkeypatch.setattr(rows_module, "run_tails", slow_tails)
    trace = trace_of(plan)
    step = StepOverRows(*paged, trace, plan)
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS[:3]]
    expected = [plain_text(engine, prompt, GREEDY, NUM_TOKENS) for prompt in prompts]
    rows = [Row(row, DecodeState(list(prompt))) for row, prompt in enumerate(prompts)]
    first, second, third = rows
    acceptance = tiny.acceptance.nearest(0.0)
    calibration = Calibration(acceptance.platt, acceptance.calibration.knots)
    prefill_row_(paged, first)

    def choice(*shapes: Shape) -> Choice:
        return Choice(shapes, (calibration,) * len(shapes), EVERYTHING)

    assert step.draft([first], choice(Shape(4, 2, 8))) == 8
    assert "tail" not in plan.on_side or tail_ran.wait(timeout=10)
    results = step.verify([second], [Chunk(third.row, third.state.tokens[:4], 0, 0)])
    third.target_len = 4
    assert [result.shape for result in results] == [Shape(4, 2, 8), PLAIN]
    assert (results[1].drafted, results[1].verified, results[1].values) == (1, 1, ())
    assert (second.target_len, second.draft_len) == (len(prompts[1]), 0)

    assert step.draft([first, second], choice(PLAIN, Shape(1, 3))) == 5
    assert second.draft_len == len(prompts[1])
    [plain, chain, joined] = step.verify([third], ())
    assert [plain.drafted, chain.drafted, joined.drafted] == [1, 4, 1]
    assert plain.context_len == first.target_len - 1
    step.draft(rows, choice(Shape(4, 2, 8), Shape(1, 3), SHAPES["static"]))
    assert third.draft_len == third.state.root_pos
    step.verify((), ())
    assert trace.count["catch up"] == 2
    while min(row.state.num_emitted for row in rows) < NUM_TOKENS:
        step.draft(rows, choice(Shape(4, 3, 8), Shape(1, 3), PLAIN))
        step.verify((), ())
    num_known = [len(text) for text in expected]
    assert [row.state.tokens[:length] for row, length in zip(rows, num_known, strict=True)] == expected


def test_a_step_without_decoding_rows_needs_no_draft(
    tiny: LoadedPair, engine: Engine, paged: Paged
) -> None:
    step = StepOverRows(*paged, Trace())
    prompt = tiny.tokenizer.encode(PROMPTS[2])
    row = Row(1, DecodeState(list(prompt)))
    assert step.verify((), [Chunk(1, prompt[:5], 0, 0)]) == []
    row.target_len = 5
    [result] = step.verify([row], ())
    assert row.state.tokens == plain_text(engine, prompt, GREEDY, 1)
    assert result.context_len == len(prompt) - 1


def test_the_target_logits_along_a_path_can_be_read(tiny: LoadedPair, paged: Paged) -> None:
    step = StepOverRows(*paged, Trace())
    rows = [Row(row, DecodeState(tiny.tokenizer.encode(prompt))) for row, prompt in enumerate(PROMPTS)]
    for row in rows[:3]:
        prefill_row_(paged, row)
    acceptance = tiny.acceptance.nearest(0.0)
    shapes = (Shape(4, 4, 8), PLAIN, Shape(1, 3))
    calibrations = (Calibration(acceptance.platt, acceptance.calibration.knots),) * 3
    step.draft(rows[:3], Choice(shapes, calibrations, EVERYTHING))
    for place, result in enumerate(step.verify(rows[3:], ())):
        assert step.logits(place, result.path).argmax(dim=1).tolist() == result.tokens


def test_too_many_nodes_are_refused_before_anything_is_committed(tiny: LoadedPair, paged: Paged) -> None:
    step = StepOverRows(*paged, Trace())
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    rows = [Row(row, DecodeState(list(prompt))) for row, prompt in enumerate(prompts)]
    for row in rows:
        prefill_row_(paged, row)
    calibration = Calibration(UNCALIBRATED.platt, UNCALIBRATED.calibration.knots)
    assert step.draft(rows, Choice((Shape(4, 4),) * 4, (calibration,) * 4, EVERYTHING)) == 4 * 17
    with pytest.raises(ShapeNotCompiled):
        step.verify((), ())
    assert [row.state.tokens for row in rows] == prompts
    assert all(row.target_len == row.draft_len == row.state.root_pos for row in rows)
    assert step.verify((), ()) == []


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
def test_a_row_with_broken_logits_gets_an_error_and_the_others_go_on(
    tiny: LoadedPair, engine: Engine, paged: Paged, sampling: SamplingConfig
) -> None:
    step = StepOverRows(*paged, Trace())
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    rows = [Row(row, DecodeState(list(prompt), sampling)) for row, prompt in enumerate(prompts)]
    for row in rows:
        prefill_row_(paged, row)
    acceptance = tiny.acceptance.nearest(sampling.temperature)
    calibrations = (Calibration(acceptance.platt, acceptance.calibration.knots),) * 4
    key, _ = paged.target.cache.layer(0)
    page = int(paged.target.cache.pages_BP[2, 0])
    sound = key[page].clone()
    key[page] = float("nan")
    step.draft(rows, Choice((Shape(4, 4, 8),) * 4, calibrations, EVERYTHING))
    results = step.verify((), ())
    key[page] = sound
    assert ["not finite" in result.error for result in results] == [False, False, True, False]
    broken = results[2]
    assert (broken.tokens, broken.path, broken.verified, len(broken.values)) == ([], [], 8, 16)
    assert rows[2].target_len == rows[2].draft_len == rows[2].state.root_pos
    step.draft(rows, Choice((Shape(4, 4, 8),) * 4, calibrations, EVERYTHING))
    assert all(result.error == "" for result in step.verify((), ()))
    for row, prompt in zip(rows, prompts, strict=True):
        num_new = row.state.num_emitted
        assert row.state.tokens == plain_text(engine, prompt, sampling, num_new)


@pytest.mark.parametrize(
    "samplings",
    ((GREEDY,) * 4, (SAMPLED,) * 4, (SAMPLED, GREEDY, FILTERED, GREEDY)),
    ids=("greedy", "sampled", "mixed"),
)
def test_on_a_device_a_batch_waits_once_to_prune_and_once_to_accept(
    tiny: LoadedPair, paged: Paged, samplings: Sequence[SamplingConfig]
) -> None:
    """Results are those of a CPU."""
    calibrations = (Calibration(PlattScale(1.8, 1.3), UNCALIBRATED.calibration.knots),) * 4
    shapes = [shape for shape in SHAPES.values() if shape.stop is None]
    texts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]

    def steps(models: Paged, trace: Trace) -> list[tuple[list[int], list[int]]]:
        rows = [Row(place, DecodeState(list(texts[place]), samplings[place])) for place in range(4)]
        for row in rows[:3]:
            prefill_row_(paged, row)
        step = StepOverRows(*models, trace)
        step.verify((), [Chunk(3, rows[3].state.tokens[:3], 0, 0)])
        rows[3].target_len = 3
        results = []
        for number in range(NUM_STEPS):
            decoding = rows[: 4 if number else 3]
            chosen = tuple(shapes[(number + row.row) % len(shapes)] for row in decoding)
            step.draft(decoding, Choice(chosen, calibrations[: len(decoding)], EVERYTHING))
            results += step.verify(rows[len(decoding) :], ())
            read = step.logits(0, [0])
            assert read.shape == (1, tiny_pair.VOCAB)
        return [(result.tokens, result.path) for result in results]

    expected = steps(paged, Trace())
    with pretend.pretended_device() as syncs:
        on_device = Paged(*map(pretend.DeviceModel, paged))  # type: ignore[arg-type]
        assert steps(on_device, pretend.StageNames()) == expected
        found = Counter(sync.stage for sync in syncs)
        unexplained = [sync for sync in syncs if not sync.is_explained]
    gumbel_noise.cache_clear()  # it cached tensors of the device
    assert found == {"prune": NUM_STEPS, "accept": NUM_STEPS}
    assert unexplained == []
