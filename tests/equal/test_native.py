"""The step in one call against `Engine.step`, its specification: result for result, and bit for bit in both
caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yggdrasil.bundle import Bundle
from yggdrasil.config import SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import YggError
from yggdrasil.kernels import load_kernels
from yggdrasil.loading import load_models
from yggdrasil.models.protocol import TokenModel
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import FixedShape, ShapePolicy
from yggdrasil.policy.structures import LowConfidence, SmallGain
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.schedule.executor import Executor
from yggdrasil.schedule.native import ByStages, NativeStep
from yggdrasil.schedule.search import plans
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult
from yggdrasil.step.draft import grow, grow_plain, head_draft, prefill
from yggdrasil.step.platt import PlattScale
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
    "growth that stops": Shape(4, 4, stop=SmallGain(4, (0.0, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3), 0.4)),
    "chain that stops": Shape(1, 4, 5, stop=LowConfidence(0.5)),
}

Step = Callable[[DecodeState, ShapePolicy], StepResult]


class TwoDeep:
    """A rule that is Python's alone."""

    native = None

    def enough(self, tree: TokenTree) -> bool:
        return int(tree.depth_N.max()) >= 2


@dataclass(kw_only=True)
class Turns(FixedShape):
    """The shapes in turn, by how long the text is."""

    shapes: tuple[Shape, ...]

    def choose(self, state: DecodeState) -> Shape:
        return self.shapes[state.root_pos % len(self.shapes)]


def never(state: DecodeState, policy: ShapePolicy, shape: Shape, began: float) -> StepResult:
    raise AssertionError("the call was to do this")


def native(engine: Engine, by_stages: ByStages = never) -> NativeStep:
    return NativeStep(engine.target, engine.draft, Trace(), by_stages)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Bundle) -> Engine:
    return Engine(*load_models(tiny_bundle), max_context=tiny_bundle.max_context)


def fresh(
    engine: Engine, prompt: Sequence[int], sampling: SamplingConfig = GREEDY, *, lag: int = 0
) -> DecodeState:
    """A request whose prompt is in both caches, but for the target's last tokens."""
    state = DecodeState(list(prompt), sampling)
    for model, left in ((engine.target, lag), (engine.draft, 0)):
        model.cache.rollback_(0)
        prefill(model, state.tokens[: state.root_pos - left])
    return state


def record(engine: Engine, state: DecodeState, result: StepResult) -> tuple[Any, ...]:
    """All that a step did, but how long it took."""
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
    return replace(result, ms=0.0, tree_of=None), arrays, kept, hidden  # type: ignore[arg-type]


def history(
    engine: Engine, state: DecodeState, step: Step, policy: ShapePolicy, num_tokens: int = NUM_TOKENS
) -> list[tuple[Any, ...]]:
    done = []
    while state.num_emitted < num_tokens:
        done.append(record(engine, state, step(state, policy)))
    return done


def stored(model: TokenModel, length: int) -> Tensor:
    """The keys and values of the first `length` indices, slot after slot."""
    return model.cache.storage_PL2GSF.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length].clone()


def both(
    tiny: LoadedPair, engine: Engine, policy: ShapePolicy, sampling: SamplingConfig, *, lag: int = 0
) -> None:
    """Holds one step against the other along a text, and then the caches."""
    for prompt in PROMPTS:
        tokens = tiny.tokenizer.encode(prompt)
        histories = []
        caches = []
        for step in (engine.step, native(engine).step):
            histories.append(
                history(
                    engine, fresh(engine, tokens, sampling, lag=min(lag, len(tokens) - 1)), step, policy
                )
            )
            caches.append([stored(model, model.cache.len) for model in (engine.target, engine.draft)])
        assert histories[1] == histories[0]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*caches, strict=True))


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", SHAPES)
def test_one_call_does_what_the_step_does(
    tiny: LoadedPair, engine: Engine, name: str, sampling: SamplingConfig
) -> None:
    both(tiny, engine, tiny.policy(shape=SHAPES[name]), sampling)


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
def test_shapes_may_change_from_step_to_step(
    tiny: LoadedPair, engine: Engine, sampling: SamplingConfig
) -> None:
    settled = tiny.policy(shape=PLAIN)
    both(
        tiny,
        engine,
        Turns(
            PLAIN, settled.acceptance, settled.latency, settled.verify_widths, shapes=tuple(SHAPES.values())
        ),
        sampling,
    )  # type: ignore[attr-defined]


def test_the_default_policy_takes_the_call(tiny: LoadedPair, engine: Engine) -> None:
    both(tiny, engine, tiny.policy(guard=False), GREEDY)


def test_the_end_of_a_prompt_runs_beside_the_first_tree(tiny: LoadedPair, engine: Engine) -> None:
    both(tiny, engine, tiny.policy(shape=Shape(4, 4)), GREEDY, lag=5)


def test_generation_takes_the_call_and_accounts_for_its_stages_and_forwards(
    tiny: LoadedPair, engine: Engine
) -> None:
    assert isinstance(engine.runner(0.0), NativeStep)
    assert engine.runner(0.8) is engine.runner(0.0)
    trace = Trace()
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
    before = engine.draft.graph_ms, engine.target.graph_ms
    results = [
        NativeStep(engine.target, engine.draft, trace, never).step(
            state, tiny.policy(shape=SHAPES["set K"])
        )
        for _ in range(4)
    ]
    assert dict(trace.count) == dict.fromkeys(STAGES, 4)
    in_draft = engine.draft.graph_ms - before[0]
    in_target = engine.target.graph_ms - before[1]
    assert 0 < in_draft < trace.total_ms["draft"]
    assert 0 < in_target < trace.total_ms["verify"]
    assert sum(trace.total_ms.values()) < sum(result.ms for result in results)


def counted(step: ByStages) -> tuple[ByStages, list[Shape]]:
    """The step, and the shapes that it was taken for."""
    taken: list[Shape] = []

    def counting(state: DecodeState, policy: ShapePolicy, shape: Shape, began: float) -> StepResult:
        result = step(state, policy, shape, began)
        taken.append(result.shape)
        return result

    return counting, taken


LEVELS = (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))


@pytest.mark.parametrize(
    "shape", (Shape(3, 3, 8, LEVELS), Shape(4, 4, 8, stop=TwoDeep())), ids=("static", "a rule of Python's")
)
def test_what_the_call_does_not_do_goes_by_stages(tiny: LoadedPair, engine: Engine, shape: Shape) -> None:
    policy = tiny.policy(shape=shape)
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    by_stages, taken = counted(engine.step_with)
    expected = history(engine, fresh(engine, tokens), engine.step, policy)
    assert history(engine, fresh(engine, tokens), native(engine, by_stages).step, policy) == expected
    assert len(taken) == len(expected)


def test_a_draft_that_lags_by_a_chunk_is_caught_up_by_stages(tiny: LoadedPair, engine: Engine) -> None:
    state = fresh(engine, tiny.tokenizer.encode(PROMPTS[0]))
    by_stages, taken = counted(engine.step_with)
    runner = native(engine, by_stages)
    known = engine.draft.cache.len
    for _ in range(engine.draft.prefill_chunk + 1):
        runner.step(state, tiny.policy(shape=PLAIN))
    assert (engine.draft.cache.len, taken) == (known, [])
    assert runner.step(state, tiny.policy(shape=Shape(4, 2))).caught_up
    assert not runner.step(state, tiny.policy(shape=Shape(4, 2))).caught_up
    assert taken == [PLAIN]


def test_at_the_end_of_the_context_the_step_says_what_is_wrong(tiny: LoadedPair, engine: Engine) -> None:
    capacity = engine.target.cache.shape.capacity
    state = fresh(engine, [5] * (capacity - 8))
    with pytest.raises(YggError, match="context is full"):
        native(engine, engine.step_with).step(state, tiny.policy(shape=Shape(4, 4, 16)))
    assert len(state.tokens) == capacity - 8


def test_logits_that_are_not_finite_lose_the_step_not_the_text(tiny: LoadedPair, engine: Engine) -> None:
    policy = tiny.policy(shape=Shape(4, 4, 16))
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    state = fresh(engine, tokens)
    key, _ = engine.target.cache.layer(0)
    sound = key[:, :, 0].clone()
    key[:, :, 0] = float("nan")
    for sampling in (GREEDY, SAMPLED):
        state.sampling = sampling
        with pytest.raises(YggError, match="not finite"):
            native(engine).step(state, policy)
        assert state.tokens == tokens
    key[:, :, 0] = sound
    state.sampling = GREEDY
    assert history(engine, state, native(engine).step, policy) == history(
        engine, fresh(engine, tokens), engine.step, policy
    )


class Asked:
    """Another policy, and how often it is asked for a shape and shown a step."""

    def __init__(self, inner: ShapePolicy) -> None:
        self.inner = inner
        self.num_asked = 0
        self.num_told = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def choose(self, state: DecodeState) -> Shape:
        self.num_asked += 1
        return self.inner.choose(state)

    def observe(self, result: StepResult) -> None:
        self.num_told += 1
        self.inner.observe(result)


def by_python(tiny: LoadedPair) -> ShapePolicy:
    """A policy that only Python can ask for costs."""
    policy = tiny.policy(shape=Shape(4, 4))
    policy.__dict__["native_costs"] = None
    return policy


FALL_BACKS: dict[str, Callable[[LoadedPair], ShapePolicy]] = {
    "the call itself": lambda tiny: tiny.policy(),
    "static": lambda tiny: tiny.policy(shape=Shape(3, 3, 8, LEVELS)),
    "a rule of Python's": lambda tiny: tiny.policy(shape=Shape(4, 4, 8, stop=TwoDeep())),
    "costs of Python's": by_python,
    "a draft that lags by a chunk": lambda tiny: tiny.policy(shape=Shape(4, 2)),
    "the end of the context": lambda tiny: tiny.policy(shape=Shape(4, 4, 16)),
}


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", FALL_BACKS)
@pytest.mark.parametrize("form", ("call", "stages", "plan"))
def test_a_step_asks_the_policy_for_a_shape_once(
    tiny: LoadedPair, engine: Engine, form: str, name: str, sampling: SamplingConfig
) -> None:
    by_stages, taken = counted(engine.step_with)
    trace = Trace()
    runner = {
        "call": NativeStep(engine.target, engine.draft, trace, by_stages),
        "stages": Engine(engine.target, engine.draft, max_context=engine.max_context, trace=trace),
        "plan": Executor(plans()[-1], engine.target, engine.draft, trace),
    }[form]
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
            runner.step(state, policy)
        assert policy.num_asked == 1
        return
    for num_steps in (1, 2, 3):
        runner.step(state, policy)
        assert (policy.num_asked, policy.num_told) == (num_steps, num_steps)
    assert trace.count["policy"] == 3
    if form == "call":
        lagging = name == "a draft that lags by a chunk"
        assert len(taken) == (0 if name == "the call itself" else 1 if lagging else 3)


def test_choosing_a_shape_is_part_of_a_step_by_stages(
    tiny: LoadedPair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard charges a session for what its policy thinks."""
    policy = tiny.policy(shape=Shape(3, 3, 8, LEVELS))
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    monkeypatch.setattr(policy, "choose", lambda state: (time.sleep(0.05), Shape(3, 3, 8, LEVELS))[1])
    for runner in (engine, native(engine, engine.step_with)):
        assert runner.step(fresh(engine, tokens), policy).ms > 50.0


@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES.values() if shape.depth],
    ids=[name for name, shape in SHAPES.items() if shape.depth],
)
def test_growth_in_one_call_is_growth_step_by_step(tiny: LoadedPair, engine: Engine, shape: Shape) -> None:
    for prompt in PROMPTS:
        state = fresh(engine, tiny.tokenizer.encode(prompt))
        head = head_draft(engine.draft, state)
        platt = PlattScale(1.8, 1.3)
        plain = grow_plain(engine.draft, state, shape, head, platt, spare=3)
        fused = grow(engine.draft, state, shape, head, platt, spare=3)
        assert (fused.shape, fused.num_run, len(fused.tree), fused.tree.capacity) == (
            plain.shape,
            plain.num_run,
            len(plain.tree),
            plain.tree.capacity,
        )
        fused.tree.check()
        for name in ("token_N", "parent_N", "depth_N", "log_prob_N", "path_NA"):
            assert torch.equal(getattr(fused.tree, name), getattr(plain.tree, name)), name


MS = st.floats(0.1, 50.0)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    width=st.integers(1, 8),
    depth=st.integers(1, 16),
    context_len=st.integers(0, 1200),
    lag=st.integers(0, 40),
)
def test_the_widths_to_choose_from_and_their_costs_are_those_of_the_policy(
    data: st.DataObject, width: int, depth: int, context_len: int, lag: int
) -> None:
    load_kernels()
    contexts = tuple(sorted(data.draw(st.sets(st.integers(0, 1000), min_size=1, max_size=3))))
    curves = [
        Curve(
            contexts,
            sizes,
            tuple(
                tuple(data.draw(st.lists(MS, min_size=len(sizes), max_size=len(sizes)))) for _ in contexts
            ),
        )
        for sizes in ((4, 8, 32, 128), (2, 4, 8, 16, 64))
    ]
    policy = FixedShape(
        PLAIN, UNCALIBRATED, LatencyModel(*curves, *data.draw(st.tuples(MS, MS, MS))), (4, 8, 16)
    )
    num_nodes = 1 + width * depth
    for verify in (None, data.draw(st.integers(1, 40))):
        expected = policy.verify_costs(Shape(width, depth, verify), num_nodes, context_len, lag)
        widths, costs_ms = torch.ops.ygg.verify_costs(
            *policy.native_costs, verify or 0, width, depth, num_nodes, context_len, lag
        )
        assert widths == expected[0]
        assert costs_ms == pytest.approx(expected[1], rel=1e-12)
