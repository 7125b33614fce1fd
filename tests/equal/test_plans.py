"""With every plan an iteration has the same tokens, trees and committed KV as `Engine.step`."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
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
from yggdrasil.pair import load_pair
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.schedule import choice as choice_module
from yggdrasil.schedule import executor as executor_module
from yggdrasil.schedule import profile as profile_module
from yggdrasil.schedule.choice import MIN_TURNS, Trial, search_plan, try_plan
from yggdrasil.schedule.executor import Executor
from yggdrasil.schedule.plan import SEQUENTIAL, Plan
from yggdrasil.schedule.profile import NUM_STEPS, profile_stages
from yggdrasil.schedule.search import plans, simulate
from yggdrasil.schedule.stages import STAGES
from yggdrasil.schedule.workload import Workload
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult
from yggdrasil.step.choice import Calibration, Choice, verify_most
from yggdrasil.step.draft import prefill
from yggdrasil.step.native import NativeStep
from yggdrasil.step.platt import PlattScale
from yggdrasil.step.sampling import gumbel_noise
from yggdrasil.store import artifacts
from yggdrasil.tokenizer import Tokenizer
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
class Sequence:
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

    native = None

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


def executor(engine: Engine, plan: Plan) -> Executor:
    return Executor(plan, engine.target, engine.draft, Trace())


Expected = dict[tuple[str, int, bool], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def expected(engine: Engine, prompts: list[list[int]]) -> Expected:
    """Results of `Engine.step`, by policy, prompt and whether tokens are sampled."""
    return {
        (name, index, sampled): history(
            engine, fresh(engine, prompt, SAMPLED if sampled else GREEDY), engine.step, Sequence(shapes)
        )
        for name, shapes in POLICIES.items()
        for index, prompt in enumerate(prompts)
        for sampled in (False, True)
    }


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_every_plan_equals_the_step(
    engine: Engine, prompts: list[list[int]], expected: Expected, plan: Plan
) -> None:
    """Each policy runs one prompt greedily and another sampled; over all plans it runs every prompt."""
    runner = executor(engine, plan)
    for turn, (name, shapes) in enumerate(POLICIES.items()):
        for sampled in (False, True):
            index = (turn + PLANS.index(plan) + sampled) % len(prompts)
            state = fresh(engine, prompts[index], SAMPLED if sampled else GREEDY)
            assert (
                history(engine, state, runner.step, Sequence(shapes)) == expected[name, index, sampled]
            ), (name, index, sampled)


def test_stages_ahead_of_time_run_and_are_used_in_these_tests(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """Without this, the equalities above would prove little."""
    trace = Trace()
    runner = Executor(MOST, engine.target, engine.draft, trace)
    state = fresh(engine, prompts[0], SAMPLED)
    num_forwards = []
    forward = engine.draft.forward
    record_forward_ = engine.draft.record_forward_
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            engine.draft,
            "forward",
            lambda meta_NM: (num_forwards.append(len(meta_NM)), forward(meta_NM))[1],
        )
        # growth
        patched.setattr(
            engine.draft,
            "record_forward_",
            lambda num, times_ms: (
                num_forwards.extend([num] * (len(times_ms) // 2)),
                record_forward_(num, times_ms),
            )[1],
        )
        for _ in range(6):
            num_forwards.clear()
            ready = state.head
            runner.step(state, Sequence(POLICIES["chain"]))
            # head, growth, tail, five nodes in chunks of the widest graph
            assert len(num_forwards) == (ready is None) + 3 + 1 + 2
            assert state.head is not None
            assert state.head.root_pos == state.root_pos == engine.draft.cache.len
    # V is known only after the first step
    assert (trace.count["tail"], trace.count["next_head"], trace.count["noise"]) == (6, 6, 5)


def stored(model: TokenModel, length: int) -> Tensor:
    """The keys and values of the first `length` indices, in slot order."""
    storage_PL2GSF = model.cache.storage_PL2GSF
    return storage_PL2GSF.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length]


@pytest.mark.parametrize("name", ("tree", "changing", "static"))
def test_the_caches_end_with_the_bits_of_a_prefill(
    engine: Engine, prompts: list[list[int]], name: str
) -> None:
    """KV that was drafted ahead of time and moved equals that of the committed text."""
    state = fresh(engine, prompts[2])
    history(engine, state, executor(engine, MOST).step, Sequence(POLICIES[name]))
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
    step: Stepper = engine.step if plan is None else executor(engine, plan).step
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
        engine.step,
        *(executor(engine, plan).step for plan in PLANS[:: len(PLANS) // 5]),
        executor(engine, MOST).step,
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


@pytest.mark.parametrize("plan", (MOST, ON_MAIN, SEQUENTIAL), ids=lambda plan: plan.name)
@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_stage_leaves_committed_history(
    engine: Engine,
    prompts: list[list[int]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    stage: str,
) -> None:
    """Interrupts before and after the work in every iteration but the first; the executor repeats it."""
    if stage not in plan.order:
        return
    # the text is extended last
    run = executor_module.RUN[stage]
    moments = ["before", "after"] if stage != "text" else ["before"]
    cut = ""

    def interrupted(it: Any) -> None:
        if cut != "before":
            run(it)
        if cut:
            raise KeyboardInterrupt

    monkeypatch.setitem(executor_module.RUN, stage, interrupted)
    runner = executor(engine, plan)
    state = fresh(engine, prompts[1], SAMPLED)

    def step(state: DecodeState, policy: Any) -> StepResult:
        nonlocal cut
        for moment in moments if state.emitted else ():
            cut = moment
            before = list(state.tokens)
            with pytest.raises(KeyboardInterrupt):
                runner.step(state, policy)
            assert state.tokens == before
        cut = ""
        return runner.step(state, policy)

    assert history(engine, state, step, Sequence(POLICIES["tree"])) == expected["tree", 1, True]


def test_no_side_job_runs_after_an_error(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    failing = threading.Event()
    ended = threading.Event()
    tail = executor_module.RUN["tail"]

    def slow_tail(it: Any) -> None:
        started.set()
        assert failing.wait(PATIENCE_S)
        time.sleep(0.05)  # an executor that did not wait would have returned by then
        tail(it)
        ended.set()

    def broken_verify(it: Any) -> None:
        assert started.wait(PATIENCE_S), "the tail does not run during verification"
        failing.set()
        raise YggError("the target is broken")

    monkeypatch.setitem(executor_module.RUN, "tail", slow_tail)
    monkeypatch.setitem(executor_module.RUN, "verify", broken_verify)
    runner = executor(engine, MOST)
    state = fresh(engine, prompts[0])
    with pytest.raises(YggError, match="the target is broken"):
        runner.step(state, Sequence(POLICIES["tree"]))
    assert ended.is_set()


def test_an_error_on_side_reaches_the_caller(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_tail(it: Any) -> None:
        raise YggError("the draft is broken")

    runner = executor(engine, MOST)
    state = fresh(engine, prompts[0])
    before = list(state.tokens)
    with monkeypatch.context() as patched:
        patched.setitem(executor_module.RUN, "tail", broken_tail)
        with pytest.raises(YggError, match="the draft is broken"):
            executor(engine, MOST).step(state, Sequence(POLICIES["tree"]))
    assert state.tokens == before
    runner.step(state, Sequence(POLICIES["tree"]))


def test_without_room_for_a_head_ahead_of_time_the_next_iteration_drafts_it(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_history = history(engine, fresh(engine, prompts[0]), engine.step, Sequence(POLICIES["tree"]))
    monkeypatch.setitem(executor_module.HELPS, "next_head", lambda it: False)
    assert (
        history(engine, fresh(engine, prompts[0]), executor(engine, MOST).step, Sequence(POLICIES["tree"]))
        == expected_history
    )


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
    for plan, planned in ((None, []), (SEQUENTIAL, []), (noise, [0.8]), (MOST, [0.0, 0.8])):
        each = Engine(engine.target, engine.draft, max_context=64, greedy_plan=plan, sampled_plan=plan)
        assert [at for at in (0.0, 0.8) if each.planned(at) is not None] == planned
    greedy = Engine(engine.target, engine.draft, max_context=64, greedy_plan=MOST)
    config = GenerateConfig(max_new_tokens=8, ignore_eos=True)
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
        runs = Executor if gain95 is not None and gain95[0] > 0 else NativeStep
        assert (pair.engine.planned(sampling.temperature) is None) == (runs is NativeStep)
        pair.engine.trace.count.clear()
        policy = pair.policy(shape=Shape(4, 4))
        list(pair.engine.generate([5, 6, 7], policy, replace(config, sampling=sampling)))
        assert ("walk" in pair.engine.trace.count) == (runs is Executor)


def test_a_plan_file_of_the_former_format_is_stale(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(payload: dict[str, Any]) -> None:
        kept = {name: payload[name] for name in ("fingerprint", "shape")}
        payload.clear()
        payload.update(kept, plan=asdict(SEQUENTIAL), profile={}, predicted_ms={}, measured=[])

    replan(tiny_bundle, tmp_path / "plan.json", monkeypatch, change)
    with pytest.raises(ArtifactError, match="plan.json: stale: written in format 1, current is 3; "):
        load_pair(tiny_bundle.name)


def work(
    engine: Engine, prompt: list[int], sampling: SamplingConfig = GREEDY, policy: Any = None
) -> Workload:
    shape = Sequence(POLICIES["tree"]) if policy is None else policy
    return Workload(
        target=engine.target,
        draft=engine.draft,
        step=engine.fast_step,
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
    for kind, name in ((NativeStep, "run"), (Executor, "step")):
        run = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, *args, run=run: (ran.append(type(self).__name__), run(self, *args))[1]
        )
    found = search_plan(work(engine, prompts[0], SAMPLED), budget_s=120.0)
    assert found.trial is not None
    assert (found.trial.plan, found.trial.num_turns) == (MOST, MIN_TURNS)
    in_trial = ran[-2 * MIN_TURNS * (1 + NUM_STEPS) :]
    assert Counter(in_trial) == {"NativeStep": len(in_trial) // 2, "Executor": len(in_trial) // 2}
    assert found.profile is not None
    assert found.profile.host_ms["tail on side"] > 0
    assert found.profile.host_ms["noise on main"] > 0
    assert "head after next_head" in found.profile.host_ms


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
    assert profile.host_ms["target_tokens after noise"] == profile.host_ms["target_tokens"]
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
    sequential = Executor(SEQUENTIAL, device_work.target, device_work.draft, Trace())
    for step in (device_work.step, sequential.step):
        assert device_work.mean_ms(step, NUM_STEPS, math.inf) == pytest.approx(56.0)
    profile = profile_stages(device_work, deadline=math.inf)
    assert profile.device_ms["head"] == pytest.approx(DRAFT_MS)
    assert profile.device_ms["grow"] == pytest.approx(3 * DRAFT_MS)
    assert profile.device_ms["verify"] == pytest.approx(TARGET_MS)
    assert (profile.host_ms["verify"], profile.overhead_ms) == pytest.approx((0.0, 0.0))  # it launches
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
