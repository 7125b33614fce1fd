"""The native step against its specification: equal results and equal bits in both caches.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from yggdrasil.bundle import Bundle
from yggdrasil.config import SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import YggError
from yggdrasil.loading import load_models
from yggdrasil.models.protocol import TokenModel
from yggdrasil.page_order import by_slot
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.guard import Guard
from yggdrasil.policy.shape import FixedShape, ShapePolicy
from yggdrasil.policy.stopping import LowConfidence, SmallGain
from yggdrasil.schedule.search import plans
from yggdrasil.state import PLAIN, DecodeState, HostHidden, Row, Shape, StepResult
from yggdrasil.step.choice import Choice
from yggdrasil.step.growth import prefill
from yggdrasil.step.native import NativeStep
from yggdrasil.step.plan import SEQUENTIAL
from yggdrasil.step.rows import StepOverRows
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

PROMPTS = ("Once upon a time", "Tom", "One day Lily saw a red fox near the café.")
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, seed=7)
NUM_TOKENS = 40
STAGES = ("policy", "draft", "prune", "verify", "accept", "commit")
SHAPES = {
    "K by the objective": Shape(4, 4),
    "set K": Shape(4, 3, 8),
    "K beyond the tree": Shape(4, 1, 16),
    "chain": Shape(1, 4),
    "chain of a set K": Shape(1, 3, 2),
    "plain": PLAIN,
    "repeats": Shape(1, 0, graft=3),
    "repeats of a set K": Shape(1, 0, 2, graft=3),
    "growth that stops": Shape(4, 4, stop=SmallGain(4, (0.0, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3), 0.4)),
    "chain that stops": Shape(1, 4, 5, stop=LowConfidence(0.5)),
    "static": Shape(3, 3, 8, (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))),
    "static of one level": Shape(2, 1, 3, (((0, 1), (0, 0)),)),
}

Step = Callable[[DecodeState, ShapePolicy], StepResult]


class TwoDeep:
    """A stop rule that exists only in Python."""

    numbers = None

    def enough(self, tree: TokenTree) -> bool:
        return int(tree.depth_N.max()) >= 2


@dataclass(kw_only=True)
class Turns(FixedShape):
    """Cycles through the shapes by the length of the text."""

    shapes: tuple[Shape, ...]

    def shape_of(self, rows: Sequence[Row]) -> Shape:
        return self.shapes[rows[0].state.root_pos % len(self.shapes)]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Bundle) -> Engine:
    return Engine(*load_models(tiny_bundle), max_context=tiny_bundle.max_context)


@pytest.fixture(scope="module")
def by_stages(engine: Engine) -> Engine:
    """The specification over the same models."""
    stepper = StepOverRows(engine.target, engine.draft, Trace())
    return Engine(engine.target, engine.draft, max_context=engine.max_context, stepper=stepper)


def fresh(
    engine: Engine, prompt: Sequence[int], sampling: SamplingConfig = GREEDY, *, lag: int = 0
) -> DecodeState:
    """A request whose prompt is in both caches, except the last tokens in the target's."""
    state = DecodeState(list(prompt), sampling)
    for model, left in ((engine.target, lag), (engine.draft, 0)):
        model.cache.rollback_(0)
        prefill(model, state.tokens[: state.root_pos - left])
    return state


def record(engine: Engine, state: DecodeState, result: StepResult) -> tuple[Any, ...]:
    """Everything in a step's result except its time."""
    arrays = [
        array.tolist()
        for array in (
            result.tree.token_N,
            result.tree.parent_N,
            result.tree.depth_N,
            result.tree.log_prob_N,
            result.tree.path_NA,
        )
    ]
    kept = engine.target.cache.len, engine.draft.cache.len, state.root_pos
    hidden = None if state.hidden_E is None else state.hidden_E.tolist()
    bare = replace(result, ms=0.0, parts=None, tree_of=None, values=(), depths=())  # type: ignore[arg-type]
    return bare, arrays, kept, hidden, list(result.values), list(result.depths)


def history(
    engine: Engine, state: DecodeState, step: Step, policy: ShapePolicy, num_tokens: int = NUM_TOKENS
) -> list[tuple[Any, ...]]:
    done = []
    while state.num_emitted < num_tokens:
        done.append(record(engine, state, step(state, policy)))
    return done


def stored(model: TokenModel, length: int) -> Tensor:
    """The keys and values of the first `length` indices, in slot order."""
    return by_slot(model.cache.storage_PL2GSF).permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length]


def both(
    tiny: LoadedPair,
    engine: Engine,
    by_stages: Engine,
    policy: ShapePolicy,
    sampling: SamplingConfig,
    *,
    lag: int = 0,
) -> None:
    """Compares the two kinds of step along a text, and then the caches."""
    for prompt in PROMPTS:
        tokens = tiny.tokenizer.encode(prompt)
        histories = []
        caches = []
        for step in (by_stages.step, engine.step):
            histories.append(
                history(
                    engine, fresh(engine, tokens, sampling, lag=min(lag, len(tokens) - 1)), step, policy
                )
            )
            caches.append([stored(model, model.cache.len) for model in (engine.target, engine.draft)])
        assert histories[1] == histories[0]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*caches, strict=True))


def test_a_step_gives_the_address_of_its_hidden_state(tiny: LoadedPair, engine: Engine) -> None:
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
    for shape in (Shape(4, 4), PLAIN, Shape(1, 3)):
        engine.step(state, tiny.policy(shape=shape))
        hidden_of = state.hidden_of
        assert isinstance(hidden_of, HostHidden)
        hidden_E = hidden_of()
        assert (hidden_E.data_ptr(), hidden_E.element_size()) == (hidden_of.address, hidden_of.item_bytes)


@pytest.mark.parametrize("failure", ("interrupt", "not finite"))
def test_a_step_that_fails_leaves_no_address_of_a_hidden_state(
    tiny: LoadedPair, engine: Engine, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """The target has run, so the output of the step before it is freed."""
    policy = tiny.policy(depth="predicted", guard=False)
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
    engine.step(state, policy)
    assert isinstance(state.hidden_of, HostHidden)
    finish_ = NativeStep._finish_

    def cut(native: NativeStep, times_ms: Sequence[float]) -> list[StepResult]:
        if failure == "interrupt":
            raise KeyboardInterrupt
        for result in native._results:
            result.path_len = 0
        return finish_(native, times_ms)

    with monkeypatch.context() as patched:
        patched.setattr(NativeStep, "_finish_", cut)
        with pytest.raises((KeyboardInterrupt, YggError)):
            engine.step(state, policy)
    assert state.hidden_of is None
    engine.step(state, policy)
    assert isinstance(state.hidden_of, HostHidden)


def test_no_address_outlives_the_output_of_another_text_s_step(tiny: LoadedPair, engine: Engine) -> None:
    first, second = (fresh(engine, tiny.tokenizer.encode(prompt)) for prompt in PROMPTS[:2])
    for state in (first, second):
        fresh(engine, state.tokens)  # the KV of its own prompt
        engine.step(state, tiny.policy(shape=PLAIN))
    assert first.hidden_of is None
    assert isinstance(second.hidden_of, HostHidden)


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", SHAPES)
def test_the_native_step_equals_its_specification(
    tiny: LoadedPair, engine: Engine, by_stages: Engine, name: str, sampling: SamplingConfig
) -> None:
    both(tiny, engine, by_stages, tiny.policy(shape=SHAPES[name]), sampling)


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
def test_shapes_may_change_from_step_to_step(
    tiny: LoadedPair, engine: Engine, by_stages: Engine, sampling: SamplingConfig
) -> None:
    calibrated = tiny.policy(shape=PLAIN)
    both(
        tiny,
        engine,
        by_stages,
        Turns(
            PLAIN,
            calibrated.acceptance,
            calibrated.latency,
            calibrated.verify_widths,
            shapes=tuple(SHAPES.values()),
        ),
        sampling,
    )  # type: ignore[attr-defined]


def test_the_default_policy_runs_natively(tiny: LoadedPair, engine: Engine, by_stages: Engine) -> None:
    both(tiny, engine, by_stages, tiny.policy(guard=False), GREEDY)


def test_results_say_whether_a_guard_watches(tiny: LoadedPair, engine: Engine) -> None:
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    for guard in (True, False):
        assert engine.step(fresh(engine, tokens), tiny.policy(guard=guard)).is_guarded == guard


def test_requests_share_what_a_policy_has_computed_but_no_guard(tiny: LoadedPair) -> None:
    first = tiny.policy()
    second = tiny.policy()
    assert isinstance(first, Guard)
    assert isinstance(second, Guard)
    assert first is not second
    assert first.inner is second.inner
    assert tiny.policy(temperature=1.0, guard=False) is not first.inner
    assert tiny.policy(graft=0, guard=False) is not first.inner


def test_the_end_of_a_prompt_runs_with_the_first_tree(
    tiny: LoadedPair, engine: Engine, by_stages: Engine
) -> None:
    both(tiny, engine, by_stages, tiny.policy(shape=Shape(4, 4)), GREEDY, lag=5)


def test_generation_runs_natively_and_records_stages_and_forwards(tiny: LoadedPair, engine: Engine) -> None:
    traced = Engine(engine.target, engine.draft, max_context=engine.max_context)
    trace = traced.trace
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
    before = engine.draft.graph_ms, engine.target.graph_ms
    results = [traced.step(state, tiny.policy(shape=SHAPES["set K"])) for _ in range(4)]
    assert dict(trace.count) == dict.fromkeys(STAGES, 4)
    in_draft = engine.draft.graph_ms - before[0]
    in_target = engine.target.graph_ms - before[1]
    assert 0 < in_draft < trace.total_ms["draft"]
    assert 0 < in_target < trace.total_ms["verify"]
    assert sum(trace.total_ms.values()) < sum(result.ms for result in results)
    parts = [result.parts for result in results]
    assert None not in parts
    assert all(min(each) > 0 for each in parts)
    assert all(sum(each) < result.ms for each, result in zip(parts, results, strict=True))
    assert in_draft < sum(each.head + each.growth for each in parts) < trace.total_ms["draft"]
    assert in_target < sum(each.verify for each in parts) < trace.total_ms["verify"]


LEVELS = (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))


def test_a_stop_rule_of_python_runs_by_stages(tiny: LoadedPair, engine: Engine, by_stages: Engine) -> None:
    both(tiny, engine, by_stages, tiny.policy(shape=Shape(4, 4, 8, stop=TwoDeep())), GREEDY)


def test_a_draft_that_lags_by_a_chunk_catches_up_over_several_steps(
    tiny: LoadedPair, engine: Engine
) -> None:
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
    known = engine.draft.cache.len
    for _ in range(engine.draft.prefill_chunk + 1):
        engine.step(state, tiny.policy(shape=PLAIN))
    assert engine.draft.cache.len == known
    assert engine.step(state, tiny.policy(shape=Shape(4, 2))).caught_up
    assert not engine.step(state, tiny.policy(shape=Shape(4, 2))).caught_up


def test_at_the_end_of_the_context_the_step_raises_a_clear_error(tiny: LoadedPair, engine: Engine) -> None:
    capacity = engine.target.cache.shape.capacity
    state = fresh(engine, [5] * (capacity - 8))
    with pytest.raises(YggError, match="context is full"):
        engine.step(state, tiny.policy(shape=Shape(4, 4, 16)))
    assert len(state.tokens) == capacity - 8


def test_logits_that_are_not_finite_lose_only_the_step(
    tiny: LoadedPair, engine: Engine, by_stages: Engine
) -> None:
    policy = tiny.policy(shape=Shape(4, 4, 16))
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    state = fresh(engine, tokens)
    key, _ = engine.target.cache.layer(0)
    sound = key[:, :, 0].clone()
    key[:, :, 0] = float("nan")
    for sampling in (GREEDY, SAMPLED):
        state.sampling = sampling
        with pytest.raises(YggError, match="not finite"):
            engine.step(state, policy)
        assert state.tokens == tokens
    key[:, :, 0] = sound
    state.sampling = GREEDY
    assert history(engine, state, engine.step, policy) == history(
        engine, fresh(engine, tokens), by_stages.step, policy
    )


class Asked:
    """Another policy; counts how often it chooses a shape and observes a step."""

    def __init__(self, inner: ShapePolicy) -> None:
        self.inner = inner
        self.num_chosen = 0
        self.num_observed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def choose(self, rows: Sequence[Row]) -> Choice:
        self.num_chosen += 1
        return self.inner.choose(rows)

    def observe(self, result: StepResult) -> None:
        self.num_observed += 1
        self.inner.observe(result)


FALL_BACKS: dict[str, Callable[[LoadedPair], ShapePolicy]] = {
    "the call itself": lambda tiny: tiny.policy(),
    "static": lambda tiny: tiny.policy(shape=Shape(3, 3, 8, LEVELS)),
    "a rule of Python's": lambda tiny: tiny.policy(shape=Shape(4, 4, 8, stop=TwoDeep())),
    "a draft that lags by a chunk": lambda tiny: tiny.policy(shape=Shape(4, 2)),
    "the end of the context": lambda tiny: tiny.policy(shape=Shape(4, 4, 16)),
}


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", FALL_BACKS)
@pytest.mark.parametrize("form", ("call", "stages", "plan"))
def test_a_step_lets_the_policy_choose_once(
    tiny: LoadedPair, engine: Engine, form: str, name: str, sampling: SamplingConfig
) -> None:
    trace = Trace()
    plan = plans()[-1] if form == "plan" else SEQUENTIAL
    stepper = None if form == "call" else StepOverRows(engine.target, engine.draft, trace, plan)
    models = engine.target, engine.draft
    step = Engine(*models, max_context=engine.max_context, trace=trace, stepper=stepper).step
    policy = Asked(FALL_BACKS[name](tiny))
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    if name == "the end of the context":
        tokens = [5] * (engine.target.cache.shape.capacity - 8)
    state = fresh(engine, tokens, sampling)
    if name == "a draft that lags by a chunk":
        state.tokens += [5] * engine.draft.prefill_chunk
        prefill(engine.target, state.tokens[:-1])
    if name == "the end of the context":
        with pytest.raises(YggError, match="context is full"):
            step(state, policy)
        assert policy.num_chosen == 1
        return
    for num_steps in (1, 2, 3):
        step(state, policy)
        assert (policy.num_chosen, policy.num_observed) == (num_steps, num_steps)
    assert trace.count["policy"] == 3


def test_choosing_a_shape_is_part_of_a_step(
    tiny: LoadedPair, engine: Engine, by_stages: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard subtracts the time of the choice, too."""
    policy = tiny.policy(shape=Shape(3, 3, 8, LEVELS))
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    choose = policy.choose
    monkeypatch.setattr(policy, "choose", lambda rows: (time.sleep(0.05), choose(rows))[1])
    for step in (by_stages.step, engine.step):
        assert step(fresh(engine, tokens), policy).ms > 50.0


def inspected(result: StepResult) -> tuple[Any, ...]:
    """Everything that an inspection adds to a result."""
    found = result.inspection
    assert found is not None
    arrays = [array.tolist() for array in (found.tree.token_N, found.tree.parent_N, found.tree.log_prob_N)]
    return arrays, list(found.kept), list(found.target_tokens)


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_of_the_step_show_the_same_drafts_and_tokens(
    tiny: LoadedPair, engine: Engine, by_stages: Engine, name: str, sampling: SamplingConfig
) -> None:
    policy = tiny.policy(shape=SHAPES[name])
    shown = []
    for step in (by_stages.step, engine.step):
        state = fresh(engine, tiny.tokenizer.encode(PROMPTS[2]), sampling)
        state.inspect = True
        shown.append([inspected(step(state, policy)) for _ in range(8)])
    assert shown[1] == shown[0]


def test_an_inspection_contains_the_verified_tree_and_the_emitted_tokens(
    tiny: LoadedPair, engine: Engine
) -> None:
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]), SAMPLED)
    state.inspect = True
    for _ in range(8):
        result = engine.step(state, tiny.policy(shape=Shape(4, 4, 8)))
        found = result.inspection
        assert found is not None
        assert (len(found.tree), len(found.kept)) == (result.drafted, result.verified) == (17, 8)
        subtree = found.tree.subtree(found.kept)
        assert subtree.token_N.tolist() == result.tree.token_N.tolist()
        assert subtree.parent_N.tolist() == result.tree.parent_N.tolist()
        assert [found.target_tokens[node] for node in result.path] == result.tokens
        found.tree.check()


def test_an_inspection_changes_neither_text_nor_caches_and_is_not_made_unasked(
    tiny: LoadedPair, engine: Engine
) -> None:
    policy = tiny.policy(shape=Shape(4, 4, 8))
    ends = []
    for inspect in (False, True):
        state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
        state.inspect = inspect
        results = [engine.step(state, policy) for _ in range(6)]
        assert all((result.inspection is not None) == inspect for result in results)
        length = engine.target.cache.len
        ends.append((state.tokens, stored(engine.target, length).tolist()))
    assert ends[0] == ends[1]
