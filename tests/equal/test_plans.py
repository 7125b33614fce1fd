"""With every plan a step has the same tokens, trees and committed KV as one stage after another.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
from torch import Tensor

from yggdrasil.bundle import Bundle
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ArtifactError, YggError
from yggdrasil.loading import load_models
from yggdrasil.models.protocol import TokenModel
from yggdrasil.page_order import by_slot
from yggdrasil.pair import load_pair
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.schedule import choice as choice_module
from yggdrasil.schedule import profile as profile_module
from yggdrasil.schedule.choice import MIN_TURNS, Trial, search_plan, try_plan
from yggdrasil.schedule.profile import NUM_STEPS, profile_stages
from yggdrasil.schedule.search import plans, simulate
from yggdrasil.schedule.workload import Workload
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult
from yggdrasil.step.choice import Calibration, Choice, verify_most
from yggdrasil.step.growth import prefill
from yggdrasil.step.native import NativeStep
from yggdrasil.step.plan import SEQUENTIAL, STAGES, Plan
from yggdrasil.step.platt import PlattScale
from yggdrasil.step.rows import StepOverRows
from yggdrasil.step.sampling import gumbel_noise
from yggdrasil.store import artifacts
from yggdrasil.text.tokenizer import Tokenizer
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

PROMPTS = ("Once upon a time", "Tom", "One day Lily saw a red fox near the café.")
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, seed=7)
PLANS = plans()
MOST = next(plan for plan in PLANS if plan.name == "tail side, next_head side, noise side")
ON_MAIN = next(plan for plan in PLANS if plan.name == "tail early, next_head main, noise late")
NUM_TOKENS = 40
PATIENCE_S = 60.0  # for work on another thread, before the test fails
NAMES = [plan.name for plan in PLANS]

Stepper = Callable[[DecodeState, Any], StepResult]


@dataclass
class Sequence(ShapePolicy):
    """A policy that cycles through shapes and scales the edges; K is the shape's."""

    shapes: tuple[Shape, ...]
    num_steps: int = field(default=0, init=False)

    def choose(self, rows: Any) -> Choice:
        self.num_steps += 1
        shape = self.shapes[(self.num_steps - 1) % len(self.shapes)]
        return Choice((shape,), (CALIBRATION,), verify_most(15))

    def observe(self, result: StepResult) -> None:
        assert result.ms > 0


class TwoDeep:
    """Stops growth at depth two."""

    numbers = None

    def enough(self, tree: TokenTree) -> bool:
        return int(tree.depth_N.max()) >= 2


CALIBRATION = Calibration(PlattScale(1.8, 1.3), UNCALIBRATED.calibration.knots)
LEVELS = (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))
POLICIES = {
    "tree": (Shape(4, 4, 16),),
    "whole tree verified": (Shape(4, 2, 16),),
    "pruned hard": (Shape(4, 4, 4),),
    "chain": (Shape(1, 4),),
    "one growth step": (Shape(4, 1),),
    "plain": (PLAIN,),
    "static": (Shape(3, 3, 8, LEVELS),),
    "stopping": (Shape(2, 4, 8, stop=TwoDeep()),),
    "changing": (
        Shape(4, 4, 16),
        PLAIN,
        Shape(1, 2),
        Shape(4, 1, 3),
        Shape(2, 3, 8, stop=TwoDeep()),
        Shape(4, 3, 4),
        PLAIN,
        PLAIN,
        Shape(1, 4),
    ),
}


@pytest.fixture(scope="module")
def engine(tiny_bundle: Bundle) -> Engine:
    return Engine(*load_models(tiny_bundle), max_context=tiny_bundle.max_context)


@pytest.fixture(scope="module")
def prompts(tiny_bundle: Bundle) -> list[list[int]]:
    tokenizer = Tokenizer(tiny_bundle.folder / "tokenizer.json", tiny_bundle.command)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def fresh(engine: Engine, prompt: list[int], sampling: SamplingConfig = GREEDY) -> DecodeState:
    """A request whose prompt is in both caches."""
    state = DecodeState(list(prompt), sampling)
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    return state


def history(
    engine: Engine, state: DecodeState, step: Stepper, policy: Sequence, num_tokens: int = NUM_TOKENS
) -> list[tuple[Any, ...]]:
    """The result of every step: tokens, path, verified tree, sizes."""
    done = []
    while len(state.emitted) < num_tokens:
        result = step(state, policy)
        tree = result.tree
        done.append(
            (
                result.tokens,
                result.path,
                tree.token_N.tolist(),
                tree.parent_N.tolist(),
                tree.log_prob_N.tolist(),
                result.drafted,
                result.context_len,
            )
        )
        assert engine.target.cache.len == state.root_pos
        assert engine.draft.cache.len <= state.root_pos
    return done


def step_over_rows(engine: Engine, plan: Plan) -> StepOverRows:
    return StepOverRows(engine.target, engine.draft, Trace(), plan)


def engine_of(stepper: StepOverRows, engine: Engine) -> Engine:
    """An engine over the same models whose steps all run in `stepper`."""
    return Engine(engine.target, engine.draft, max_context=engine.max_context, stepper=stepper)


def step_by(engine: Engine, plan: Plan) -> Stepper:
    return engine_of(step_over_rows(engine, plan), engine).step


Expected = dict[tuple[str, int, bool], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def expected(engine: Engine, prompts: list[list[int]]) -> Expected:
    """Results of the sequential plan, by policy, prompt and whether tokens are sampled."""
    step = step_by(engine, SEQUENTIAL)
    return {
        (name, index, sampled): history(
            engine, fresh(engine, prompt, SAMPLED if sampled else GREEDY), step, Sequence(shapes)
        )
        for name, shapes in POLICIES.items()
        for index, prompt in enumerate(prompts)
        for sampled in (False, True)
    }


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_every_plan_equals_the_sequential_one(
    engine: Engine, prompts: list[list[int]], expected: Expected, plan: Plan
) -> None:
    """Each policy runs one prompt greedily and another sampled; over all plans it runs every prompt."""
    step = step_by(engine, plan)
    for turn, (name, shapes) in enumerate(POLICIES.items()):
        for sampled in (False, True):
            index = (turn + PLANS.index(plan) + sampled) % len(prompts)
            state = fresh(engine, prompts[index], SAMPLED if sampled else GREEDY)
            assert history(engine, state, step, Sequence(shapes)) == expected[name, index, sampled], (
                name,
                index,
                sampled,
            )


def test_stages_ahead_of_time_run_and_are_used_in_these_tests(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """Without this, the equalities above would prove little."""
    trace = Trace()
    step = engine_of(StepOverRows(engine.target, engine.draft, trace, MOST), engine).step
    state = fresh(engine, prompts[0], SAMPLED)
    num_forwards = []
    forward = engine.draft.forward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            engine.draft,
            "forward",
            lambda meta_NM: (num_forwards.append(len(meta_NM)), forward(meta_NM))[1],
        )
        for _ in range(6):
            num_forwards.clear()
            ready = state.head
            step(state, Sequence(POLICIES["chain"]))
            # root, growth, tail, five nodes of the next head
            assert len(num_forwards) == (ready is None) + 3 + 1 + 1
            assert state.head is not None
            assert state.head.root_pos == state.root_pos == engine.draft.cache.len
    assert (trace.count["tail"], trace.count["next_head"], trace.count["noise"]) == (6, 6, 6)


def stored(model: TokenModel, length: int) -> Tensor:
    """The keys and values of the first `length` indices, in slot order."""
    return by_slot(model.cache.storage_PL2GSF).permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length]


@pytest.mark.parametrize("name", ("tree", "changing", "static"))
def test_the_caches_end_with_the_bits_of_a_prefill(
    engine: Engine, prompts: list[list[int]], name: str
) -> None:
    """KV that was drafted ahead of time and moved equals that of the committed text."""
    state = fresh(engine, prompts[2])
    history(engine, state, step_by(engine, MOST), Sequence(POLICIES[name]))
    same_bits_as_a_prefill(engine, state)


def same_bits_as_a_prefill(engine: Engine, state: DecodeState) -> None:
    """Compares the caches with those after a prefill of the text; overwrites them."""
    models = (engine.target, engine.draft)
    # the next root's KV too
    lengths = [model.cache.len + (state.head is not None and model is engine.draft) for model in models]
    ours = [stored(model, length).clone() for model, length in zip(models, lengths, strict=True)]
    for model, length, kept in zip(models, lengths, ours, strict=True):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:length])
        assert torch.equal(stored(model, length), kept)


@pytest.mark.parametrize("plan", (None, MOST, ON_MAIN), ids=str)
def test_a_draft_that_lags_far_catches_up_a_chunk_a_step(
    engine: Engine, prompts: list[list[int]], plan: Plan | None
) -> None:
    step: Stepper = engine.step if plan is None else step_by(engine, plan)
    state = fresh(engine, prompts[0])
    chunk = engine.draft.prefill_chunk
    known = engine.draft.cache.len
    for _ in range(2 * chunk + 5):
        step(state, Sequence((PLAIN,)))
    assert engine.draft.cache.len == known
    results = []
    lens = []
    for _ in range(3):
        results.append(step(state, Sequence((Shape(4, 4, 16),))))
        lens.append(engine.draft.cache.len)
    assert lens[:2] == [known + chunk, known + 2 * chunk]
    assert [(result.caught_up, result.shape, result.drafted) for result in results] == [
        (True, PLAIN, 1),
        (True, PLAIN, 1),
        (False, Shape(4, 4, 16), 17),
    ]
    plain = fresh(engine, prompts[0])
    for _ in range(len(state.emitted)):
        engine.step(plain, Sequence((PLAIN,)))
    assert plain.emitted[: len(state.emitted)] == state.emitted


def test_steps_and_plans_may_alternate(
    engine: Engine, prompts: list[list[int]], expected: Expected
) -> None:
    steppers = [
        step_by(engine, SEQUENTIAL),
        *(step_by(engine, plan) for plan in PLANS[:: len(PLANS) // 5]),
        step_by(engine, MOST),
    ]
    turn = 0

    def step(state: DecodeState, policy: Any) -> StepResult:
        nonlocal turn
        turn += 1
        return steppers[turn * 5 % len(steppers)](state, policy)

    for name, shapes in POLICIES.items():
        assert (
            history(engine, fresh(engine, prompts[0]), step, Sequence(shapes)) == expected[name, 0, False]
        ), name


@pytest.mark.parametrize("name", ("tree", "changing", "stopping"))
def test_steps_in_cpp_and_plans_may_alternate(
    engine: Engine, prompts: list[list[int]], expected: Expected, name: str
) -> None:
    """A step in C++ uses no head ahead of time, and the plan none of an earlier root."""
    steppers = (engine.step, step_by(engine, MOST), step_by(engine, MOST))
    state = fresh(engine, prompts[0])
    policy = Sequence(POLICIES[name])
    turn = 0
    while len(state.emitted) < NUM_TOKENS:
        steppers[turn % len(steppers)](state, policy)
        turn += 1
    tokens = [token for emitted, *_ in expected[name, 0, False] for token in emitted]
    assert list(state.emitted)[:NUM_TOKENS] == tokens[:NUM_TOKENS]
    same_bits_as_a_prefill(engine, state)


class Interruptions:
    """Raises KeyboardInterrupt at a moment of one stage of a step.

    Attributes:
        moment: "before" or "after" the work of the stage, "between" the moves of the two models' KV in a
            commit, or empty.
    """

    def __init__(self, stepper: StepOverRows, stage: str, patched: pytest.MonkeyPatch) -> None:
        self.moment = ""
        self._in_commit = stage == "commit"
        if stage in stepper._stages:
            wrapped = partial(self._around, stepper._stages[stage])
            patched.setattr(stepper, "_stages", {**stepper._stages, stage: wrapped})
        if self._in_commit:
            for moment, model in (("between", stepper._target), ("after", stepper._draft_model)):
                cache = model.cache
                patched.setattr(cache, "keep_", partial(self._keep_, cache.keep_, moment))

    def _around(self, run: Callable[[Any], None], argument: Any) -> None:
        """A stage, with the batch, or the policy's choice, with the rows."""
        if self.moment == "before":
            raise KeyboardInterrupt
        run(argument)
        # the last work of a commit is the text, and then the step has happened
        if self.moment and not self._in_commit:
            raise KeyboardInterrupt

    def _keep_(self, keep_: Callable[..., None], moment: str, *args: Any) -> None:
        keep_(*args)
        if self.moment == moment:
            raise KeyboardInterrupt


@pytest.mark.parametrize("plan", (MOST, ON_MAIN, SEQUENTIAL), ids=lambda plan: plan.name)
@pytest.mark.parametrize("stage", ("policy", *STAGES))
def test_an_interrupted_stage_leaves_committed_history(
    engine: Engine,
    prompts: list[list[int]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    stage: str,
) -> None:
    """Interrupts before and after the work in every step but the first; then the step is repeated.

    A commit is interrupted after it has moved the KV of one model, and of both.
    """
    if stage not in ("policy", *plan.order):
        return
    moments = ("before", "between", "after") if stage == "commit" else ("before", "after")
    stepper = step_over_rows(engine, plan)
    interruptions = Interruptions(stepper, stage, monkeypatch)
    run_step = engine_of(stepper, engine).step
    state = fresh(engine, prompts[1], SAMPLED)
    num_interrupts = 0

    def step(state: DecodeState, policy: Any) -> StepResult:
        nonlocal num_interrupts
        for moment in moments if state.emitted else ():
            interruptions.moment = moment
            before = list(state.tokens)
            with monkeypatch.context() as patched:
                if stage == "policy":
                    choose = partial(interruptions._around, policy.choose)
                    patched.setattr(policy, "choose", choose)
                with pytest.raises(KeyboardInterrupt):
                    run_step(state, policy)
            assert state.tokens == before
            num_interrupts += 1
        interruptions.moment = ""
        return run_step(state, policy)

    found = history(engine, state, step, Sequence(POLICIES["tree"]))
    assert found == expected["tree", 1, True]
    assert num_interrupts == len(moments) * (len(found) - 1)


def replace_stage(stepper: StepOverRows, stage: str, run: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a stage run something else; returns what it ran."""
    before = stepper._stages[stage]
    stepper._stages = {**stepper._stages, stage: run}
    return before


def test_no_side_job_runs_after_an_error(engine: Engine, prompts: list[list[int]]) -> None:
    started = threading.Event()
    failing = threading.Event()
    ended = threading.Event()

    def slow_tail(batch: Any) -> None:
        started.set()
        assert failing.wait(PATIENCE_S)
        time.sleep(0.05)  # a step that did not wait would have returned by then
        tail(batch)
        ended.set()

    def broken_verify(batch: Any) -> None:
        assert started.wait(PATIENCE_S), "the tail does not run during verification"
        failing.set()
        raise YggError("the target is broken")

    stepper = step_over_rows(engine, MOST)
    tail = replace_stage(stepper, "tail", slow_tail)
    replace_stage(stepper, "verify", broken_verify)
    state = fresh(engine, prompts[0])
    with pytest.raises(YggError, match="the target is broken"):
        engine_of(stepper, engine).step(state, Sequence(POLICIES["tree"]))
    assert ended.is_set()


def test_an_error_on_side_reaches_the_caller(engine: Engine, prompts: list[list[int]]) -> None:
    def broken_tail(batch: Any) -> None:
        raise YggError("the draft is broken")

    stepper = step_over_rows(engine, MOST)
    step = engine_of(stepper, engine).step
    state = fresh(engine, prompts[0])
    before = list(state.tokens)
    tail = replace_stage(stepper, "tail", broken_tail)
    with pytest.raises(YggError, match="the draft is broken"):
        step(state, Sequence(POLICIES["tree"]))
    assert state.tokens == before
    replace_stage(stepper, "tail", tail)
    step(state, Sequence(POLICIES["tree"]))


def test_without_room_for_a_head_ahead_of_time_the_next_step_drafts_it(
    engine: Engine, prompts: list[list[int]], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepOverRows, "_has_room", lambda self, batch, place: False)
    trace = Trace()
    step = engine_of(StepOverRows(engine.target, engine.draft, trace, MOST), engine).step
    found = history(engine, fresh(engine, prompts[0]), step, Sequence(POLICIES["tree"]))
    assert found == expected["tree", 0, False]
    assert "next_head" not in trace.count
    assert trace.count["tail"] > 0


def test_the_next_head_runs_ahead_of_time_however_long_the_tail_takes(
    engine: Engine, prompts: list[list[int]], expected: Expected
) -> None:
    """Both are on "side": when the head is handed over, the tail may still run or wait."""
    handed_over = threading.Event()
    trace = Trace()
    stepper = StepOverRows(engine.target, engine.draft, trace, MOST)

    def slow_tail(batch: Any) -> None:
        assert handed_over.wait(PATIENCE_S), "the head is not handed over while the tail runs"
        handed_over.clear()
        tail(batch)

    def follow(batch: Any) -> None:
        handed_over.set()
        accept(batch)

    tail = replace_stage(stepper, "tail", slow_tail)
    accept = replace_stage(stepper, "accept", follow)
    step = engine_of(stepper, engine).step
    found = history(engine, fresh(engine, prompts[0]), step, Sequence(POLICIES["tree"]))
    assert found == expected["tree", 0, False]
    assert trace.count["next_head"] == trace.count["tail"] == len(found)


@pytest.mark.parametrize("plan", (MOST, ON_MAIN), ids=lambda plan: plan.name)
def test_a_plan_can_fill_the_context_completely(
    engine: Engine, prompts: list[list[int]], plan: Plan
) -> None:
    prompt = (prompts[2] * 20)[: engine.max_context - 20]
    config = GenerateConfig(max_new_tokens=20, ignore_eos=True)
    planned = Engine(engine.target, engine.draft, max_context=engine.max_context, greedy_plan=plan)
    texts = [
        [
            token
            for result in each.generate(prompt, Sequence(POLICIES["tree"]), config)
            for token in result.tokens
        ]
        for each in (engine, planned)
    ]
    assert texts[0] == texts[1]
    assert len(texts[1]) == 20


def test_a_plan_runs_only_where_it_has_an_effect(engine: Engine) -> None:
    noise = next(plan for plan in PLANS if plan.name == "noise side")
    config = GenerateConfig(max_new_tokens=8, ignore_eos=True)
    for plan, planned in ((SEQUENTIAL, []), (noise, [0.8]), (MOST, [0.0, 0.8])):
        each = Engine(engine.target, engine.draft, max_context=64, greedy_plan=plan, sampled_plan=plan)
        ran_by_stages = []
        for sampling in (GREEDY, SAMPLED):
            assert each.plan(sampling.temperature) is plan
            each.trace.count.clear()
            policy = Sequence(POLICIES["tree"])
            list(each.generate([5, 6, 7], policy, replace(config, sampling=sampling)))
            if "choose" in each.trace.count:  # a stage that C++ does not report
                ran_by_stages.append(sampling.temperature)
        assert ran_by_stages == planned
    greedy = Engine(engine.target, engine.draft, max_context=64, greedy_plan=MOST)
    assert greedy.plan(0.8) is SEQUENTIAL
    list(greedy.generate([5, 6, 7], Sequence(POLICIES["tree"]), config))
    assert greedy.trace.count["next_head"] > 0


def replan(
    bundle: Bundle, path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    """A changed copy of the bundle's plan file."""
    payload = artifacts.load_json(bundle.plan_path, "")
    change(payload)
    artifacts.save_json(path, payload)
    monkeypatch.setattr(Bundle, "plan_path", property(lambda self: path))


@pytest.mark.parametrize("greedy", (None, (-0.02, 0.05), (0.02, 0.05)), ids=str)
@pytest.mark.parametrize("sampled", (None, (-0.02, 0.05), (0.02, 0.05)), ids=str)
def test_a_loaded_pair_runs_natively_unless_a_plan_was_measured_to_gain(
    tiny_bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    greedy: tuple[float, float] | None,
    sampled: tuple[float, float] | None,
) -> None:
    def change(payload: dict[str, Any]) -> None:
        for kind, gain95 in (("greedy", greedy), ("sampled", sampled)):
            trial = Trial(MOST, plan_ms=1.0, step_ms=1.0, num_turns=9, gain95=gain95)
            payload[kind]["trial"] = None if gain95 is None else asdict(trial)

    replan(tiny_bundle, tmp_path / "plan.json", monkeypatch, change)
    pair = load_pair(tiny_bundle.name)
    config = GenerateConfig(max_new_tokens=8, ignore_eos=True)
    for sampling, gain95 in ((GREEDY, greedy), (SAMPLED, sampled)):
        gains = gain95 is not None and gain95[0] > 0
        assert pair.engine.plan(sampling.temperature) == (MOST if gains else SEQUENTIAL)
        pair.engine.trace.count.clear()
        policy = pair.policy(shape=Shape(4, 4))
        list(pair.engine.generate([5, 6, 7], policy, replace(config, sampling=sampling)))
        assert ("choose" in pair.engine.trace.count) == gains


def test_a_plan_file_of_the_former_format_is_stale(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(payload: dict[str, Any]) -> None:
        kept = {name: payload[name] for name in ("fingerprint", "shape")}
        payload.clear()
        payload.update(kept, plan=asdict(SEQUENTIAL), profile={}, predicted_ms={}, measured=[])

    replan(tiny_bundle, tmp_path / "plan.json", monkeypatch, change)
    with pytest.raises(ArtifactError, match="plan.json: stale: written in format 1, current is 4; "):
        load_pair(tiny_bundle.name)


def work(
    engine: Engine, prompt: list[int], sampling: SamplingConfig = GREEDY, policy: Any = None
) -> Workload:
    shape = Sequence(POLICIES["tree"]) if policy is None else policy
    return Workload(
        target=engine.target,
        draft=engine.draft,
        step=engine.step,
        step_ms=1.0,
        prompt=prompt,
        policy=shape,
        max_context=engine.max_context,
        sampling=sampling,
    )


def test_the_compared_arms_are_the_plan_and_the_step_without_one(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_module, "best_plan", lambda profile: MOST)
    monkeypatch.setattr(choice_module, "MAX_TURNS", MIN_TURNS)
    ran: list[str] = []
    for kind in (NativeStep, StepOverRows):
        run = kind.run
        monkeypatch.setattr(
            kind, "run", lambda self, *args, run=run: (ran.append(type(self).__name__), run(self, *args))[1]
        )
    found = search_plan(work(engine, prompts[0], SAMPLED), budget_s=120.0)
    assert found.trial is not None
    assert (found.trial.plan, found.trial.num_turns) == (MOST, MIN_TURNS)
    in_trial = ran[-2 * MIN_TURNS * (1 + NUM_STEPS) :]
    assert Counter(in_trial) == {"NativeStep": len(in_trial) // 2, "StepOverRows": len(in_trial) // 2}
    assert found.profile is not None
    assert found.profile.host_ms["tail on side"] > 0
    assert found.profile.host_ms["noise on main"] > 0
    assert "draft after next_head" in found.profile.host_ms


def test_greedy_decoding_measures_no_noise_and_no_gain_from_noise(
    engine: Engine, prompts: list[list[int]]
) -> None:
    greedy = work(engine, prompts[0])
    greedy.prefill()
    profile = profile_stages(greedy, deadline=math.inf)
    assert (
        profile.host_ms["noise on main"]
        == profile.host_ms["noise on side"]
        == profile.stretch_ms["noise"]
        == 0
    )
    assert profile.host_ms["choose after noise"] == profile.host_ms["choose"]
    assert profile.host_ms["tail on main"] > 0


def test_a_context_without_room_for_a_measurement_gets_no_plan(engine: Engine) -> None:
    found = search_plan(work(engine, [5] * 250), budget_s=math.inf)
    assert found.plan is None
    assert "time or context did not suffice" in found.why()


DRAFT_MS = 8.0
TARGET_MS = 16.0


@dataclass
class Slow(Sequence):
    """A policy that occupies the host for some time."""

    def choose(self, state: DecodeState) -> Shape:
        time.sleep(DRAFT_MS / 1e3)
        return super().choose(state)


@pytest.fixture
def device_work(engine: Engine, prompts: list[list[int]]) -> Iterator[Workload]:
    """Iterations of 56 ms: 8 for the host, 4 draft forwards of 8 and a verification of 16 on a device."""
    with pretend.pretended_device():
        models = pretend.DeviceModel(engine.target, TARGET_MS), pretend.DeviceModel(engine.draft, DRAFT_MS)
        on_device = Engine(*models, max_context=engine.max_context)
        found = work(on_device, prompts[0], policy=Slow((Shape(4, 4, 4),)))
        found.prefill()
        yield found
    gumbel_noise.cache_clear()  # it cached tensors of the device


def test_the_time_of_an_iteration_includes_the_device_s_work(
    device_work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the sum of its stages: a stage's wait before it starts counts."""
    monkeypatch.setattr(profile_module, "ROUNDS", 1)
    for step in (device_work.step, device_work.step_by(SEQUENTIAL, Trace())):
        assert device_work.mean_ms(step, NUM_STEPS, math.inf) == pytest.approx(56.0)
    profile = profile_stages(device_work, deadline=math.inf)
    assert profile.device_ms["draft"] == pytest.approx(4 * DRAFT_MS)
    assert profile.device_ms["verify"] == pytest.approx(TARGET_MS)
    assert profile.host_ms["verify"] == pytest.approx(0.0)  # it launches
    assert profile.overhead_ms == pytest.approx(DRAFT_MS)  # the policy
    assert simulate(SEQUENTIAL, profile).makespan_ms == pytest.approx(56.0)


def test_on_a_device_a_plan_that_overlaps_work_gains(
    device_work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next head is drafted while the host chooses a shape, except the last of a run."""
    monkeypatch.setattr(choice_module, "MAX_TURNS", MIN_TURNS)
    plan = next(plan for plan in PLANS if plan.name == "tail side, next_head side")
    trial = try_plan(device_work, plan, math.inf)
    assert (trial.step_ms, trial.plan_ms) == pytest.approx((56.0, 56.0 - 3 / 4 * DRAFT_MS))
    assert trial.gain95 == pytest.approx((6 / 56, 6 / 56))
    assert trial.gains
