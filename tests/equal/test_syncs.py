"""On a device the host waits only at marked places: once to prune and once to accept, never to draft.

Most tests need no device: `pretend` makes tensors that take the paths of CUDA tensors and records every
call for which the host would wait. The last test checks the same on a real device.
"""

from __future__ import annotations

import linecache
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
from conftest import TINY, compiled
from torch import Tensor

from yggdrasil.config import GenerateConfig, GrammarConfig, ProcessorConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.models.packing import pack_chain_
from yggdrasil.offline.forest import Seed, grow_forest
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.policy.depth import DepthPredictor
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.schedule.search import plans
from yggdrasil.staging import upload
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult
from yggdrasil.step.choice import Calibration, Choice, verify_most
from yggdrasil.step.growth import Frontier, prefill
from yggdrasil.step.plan import SEQUENTIAL, Plan
from yggdrasil.step.platt import UNSCALED, PlattScale
from yggdrasil.step.rows import StepOverRows
from yggdrasil.step.sampling import gumbel_noise
from yggdrasil.text.grammar import Grammars, GrammarState
from yggdrasil.trace import Trace

NUM_STEPS = 6
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=7)
PROCESSED = replace(
    SAMPLED,
    processors=ProcessorConfig(
        logit_bias=((7, 2.5),),
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        no_repeat_ngram_size=3,
        banned=((14,), (21, 28)),
        min_tokens=3,
        ends=(0, 100),
    ),
)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED, "processed": PROCESSED}
CALIBRATION = Calibration(PlattScale(1.8, 1.3), UNCALIBRATED.calibration.knots)
LEVELS = (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))
SHAPES = (
    PLAIN,
    *(Shape(width, depth, 8) for width in (1, 4) for depth in (1, 2, 3, 4)),
    Shape(4, 4, 16),
    Shape(3, 3, 6, LEVELS),
)
ON_MAIN = next(plan for plan in plans() if plan.name == "tail early, next_head main, noise late")
Stepper = Callable[[DecodeState, Any], StepResult]


@dataclass
class Always(ShapePolicy):
    """One shape, the edges scaled."""

    shape: Shape

    def choose(self, rows: Any) -> Choice:
        return Choice((self.shape,), (CALIBRATION,), verify_most(15))

    def observe(self, result: StepResult) -> None: ...


@pytest.fixture
def syncs() -> Iterator[list[pretend.Sync]]:
    with pretend.pretended_device() as found:
        yield found
    gumbel_noise.cache_clear()  # it cached tensors of the device


def on_device(pair: LoadedPair, plan: Plan = SEQUENTIAL) -> tuple[Engine, Stepper]:
    """An engine over models with pretended CUDA tensors, and its step by a plan."""
    models = pretend.DeviceModel(pair.engine.target), pretend.DeviceModel(pair.engine.draft)
    trace = pretend.StageNames()
    stepper = StepOverRows(*models, trace, plan)
    engine = Engine(*models, max_context=pair.bundle.max_context, trace=trace, stepper=stepper)
    return engine, engine.step


def in_torch(pair: LoadedPair) -> Stepper:
    """The step of `on_device`, over the same models on the host."""
    models = pair.engine.target, pair.engine.draft
    stepper = StepOverRows(*models, Trace())
    return Engine(*models, max_context=pair.bundle.max_context, stepper=stepper).step


def texts(
    engine: Engine, step: Stepper, policy: Any, sampling: SamplingConfig, prompt: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Tokens and accepted paths of a few steps."""
    state = DecodeState(list(prompt), sampling)
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    return [(result.tokens, result.path) for result in (step(state, policy) for _ in range(NUM_STEPS))]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_waits_once_to_prune_and_once_to_accept(
    tiny: LoadedPair, syncs: list[pretend.Sync], shape: Shape, sampling: SamplingConfig
) -> None:
    prompt = tiny.tokenizer.encode("One day Lily saw a red fox")
    expected = texts(tiny.engine, in_torch(tiny), Always(shape), sampling, prompt)
    engine, step = on_device(tiny)
    syncs.clear()
    assert texts(engine, step, Always(shape), sampling, prompt) == expected
    assert Counter(sync.stage for sync in syncs) == Counter(
        {"accept": NUM_STEPS} | ({"prune": NUM_STEPS} if shape.depth else {})
    )
    assert [sync for sync in syncs if not sync.is_explained] == []


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("shape", (Shape(1, 0, graft=3), Shape(4, 3, 8, graft=3)), ids=str)
def test_a_graft_does_not_wait_more_often(
    tiny: LoadedPair, syncs: list[pretend.Sync], shape: Shape, sampling: SamplingConfig
) -> None:
    prompt = 3 * tiny.tokenizer.encode(" a red fox saw")
    expected = texts(tiny.engine, in_torch(tiny), Always(shape), sampling, prompt)
    engine, step = on_device(tiny)
    syncs.clear()
    assert texts(engine, step, Always(shape), sampling, prompt) == expected
    found = Counter(sync.stage for sync in syncs)
    assert found["accept"] == NUM_STEPS
    assert 1 <= found["prune"] <= NUM_STEPS  # of a tree, so something was grafted or drafted
    assert {*found} == {"prune", "accept"}
    assert [sync for sync in syncs if not sync.is_explained] == []


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_plan_does_not_wait_more_often(
    tiny: LoadedPair, syncs: list[pretend.Sync], sampling: SamplingConfig
) -> None:
    """Tail, noise and next head are queued after running work; `next_head` takes several forwards."""
    prompt = tiny.tokenizer.encode("One day Lily saw a red fox")
    expected = texts(tiny.engine, in_torch(tiny), Always(Shape(4, 3, 8)), sampling, prompt)
    engine, step = on_device(tiny, ON_MAIN)
    syncs.clear()
    assert texts(engine, step, Always(Shape(4, 3, 8)), sampling, prompt) == expected
    assert Counter(sync.stage for sync in syncs) == {"prune": NUM_STEPS, "accept": NUM_STEPS}
    assert [sync for sync in syncs if not sync.is_explained] == []


@pytest.mark.parametrize("shape", (Shape(1, 1), Shape(4, 3, 8)), ids=str)
def test_masks_of_a_grammar_are_computed_while_the_device_verifies(
    tiny: LoadedPair, syncs: list[pretend.Sync], monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    """Their paths are read before the target's forward is launched, and they wait for nothing."""
    grammar = GrammarConfig.of("regex", r"( (the|a) (red|old|small) (fox|dog|owl) and){9}")
    config = GenerateConfig(sampling=SamplingConfig.of({"grammar": grammar}))
    prompt = tiny.tokenizer.encode("One day Lily saw a red fox")
    steps = tiny.engine.generate(prompt, Always(PLAIN), config)
    plain = [token for result in steps for token in result.tokens]
    engine, step = on_device(tiny)
    grammars = Grammars(tiny.tokenizer, tiny.engine.target.vocab, tiny.bundle.eos_tokens)
    state = DecodeState(list(prompt), config.sampling, grammar=grammars.state(grammar))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    happened: list[str] = []
    found: list[pretend.Sync] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.extend(syncs)
            happened.extend(["wait"] * len(syncs))
            syncs.clear()
            happened.append(name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(engine.target, "forward", noted("verify", engine.target.forward))
    monkeypatch.setattr(GrammarState, "allowed_V", noted("mask", GrammarState.allowed_V))
    for _ in range(NUM_STEPS):
        syncs.clear()
        happened.clear()
        result = step(state, Always(shape))
        after = happened[happened.index("verify") + 1 :]
        assert after == ["mask"] * result.verified
        assert [sync.stage for sync in syncs] == ["accept"]
        assert [sync for sync in found if not sync.is_explained] == []
    assert state.emitted == plain[: len(state.emitted)]


def test_the_policy_waits_only_for_the_hidden_state(
    tiny: LoadedPair, syncs: list[pretend.Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step = on_device(tiny)
    assert isinstance(tiny.depth.predictor, DepthPredictor)
    policy = tiny.policy(depth="predicted", guard=False)
    choose = policy.choose

    def named(rows: Any) -> Choice:
        with engine.trace.stage("policy"):
            return choose(rows)

    monkeypatch.setattr(policy, "choose", named)
    texts(engine, step, policy, GREEDY, tiny.tokenizer.encode("Tom"))
    in_policy = [sync for sync in syncs if sync.stage == "policy"]
    assert 1 <= len(in_policy) <= NUM_STEPS
    assert [sync for sync in syncs if not sync.is_explained] == []


def test_the_record_finds_a_planted_sync(
    tiny: LoadedPair, syncs: list[pretend.Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Frontier.take

    def reading(self: Frontier, width: int) -> tuple[Tensor, Tensor, Tensor]:
        taken = take(self, width)
        assert taken[2][0].item() <= 0
        return taken

    monkeypatch.setattr(Frontier, "take", reading)
    engine, step = on_device(tiny)
    texts(engine, step, Always(Shape(4, 3, 8)), GREEDY, tiny.tokenizer.encode("Tom"))
    planted = [sync for sync in syncs if sync.stage == "draft"]
    assert len(planted) == 3 * NUM_STEPS
    assert not any(sync.is_explained for sync in planted)


WAITING: dict[str, Callable[[Tensor], object]] = {
    "a number assigned to one element": lambda x: x.__setitem__(0, 5),
    "a number assigned by index": lambda x: x.__setitem__(upload([0, 1], "cuda"), 5),
    "a mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "truth": lambda x: bool(x.any()),
    "an integer": lambda x: int(x[0]),
    "item": lambda x: x[0].item(),
    "a list": lambda x: x.tolist(),
    "a copy to the host": lambda x: x.cpu(),
    "equality": lambda x: torch.equal(x, x.clone()),
    "a tensor from a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "a copy from pageable memory": lambda x: x.copy_(torch.arange(4), non_blocking=True),
    "a tensor moved from pageable memory": lambda x: torch.arange(4).to("cuda", non_blocking=True),
    "a blocking copy from pinned memory": lambda x: torch.arange(4).pin_memory().to("cuda"),
}
QUEUED: dict[str, Callable[[Tensor], object]] = {
    "a number assigned to a slice": lambda x: x.__setitem__(slice(0, 1), 5),
    "a fill": lambda x: x[:1].fill_(5),
    "a tensor assigned to a slice": lambda x: x.__setitem__(slice(0, 2), x[2:]),
    "a gather": lambda x: x[upload([0, 1], "cuda")],
    "a scatter of a number": lambda x: x.scatter_(0, upload([0, 1], "cuda"), 7),
    "arithmetic": lambda x: (x + 1).max(dim=0),
    "an upload": lambda x: upload([[1, 2], [3, 4]], "cuda", dtype=torch.int32),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_record_knows_what_waits(syncs: list[pretend.Sync], name: str) -> None:
    x = torch.arange(4, device="cuda")
    WAITING[name](x)
    assert len(syncs) == 1, syncs


@pytest.mark.parametrize("name", QUEUED)
def test_the_record_knows_what_does_not_wait(syncs: list[pretend.Sync], name: str) -> None:
    x = torch.arange(4, device="cuda")
    QUEUED[name](x)
    assert syncs == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_device_warns_of_the_same_syncs(
    ygg_home: Path, llama_folders: tuple[str, str], kernels: None, sampling: SamplingConfig
) -> None:
    compiled(ygg_home, "tiny-cuda", llama_folders, replace(TINY, device="cuda"))
    pair = load_pair("tiny-cuda")
    prompt = pair.tokenizer.encode("One day Lily saw a red fox")
    policy = Always(Shape(4, 3, 8))
    # first uses allocate, and allocations may wait
    texts(pair.engine, pair.engine.step, policy, sampling, prompt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            texts(pair.engine, pair.engine.step, policy, sampling, prompt)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert [
        warning
        for warning in waits
        if "# sync: " not in linecache.getline(warning.filename, warning.lineno)
    ] == []
    assert len(waits) == 2 * NUM_STEPS


def test_calibration_trees_of_greedy_text_wait_for_nothing(
    tiny: LoadedPair, syncs: list[pretend.Sync]
) -> None:
    prompt = tiny.tokenizer.encode("One day Lily saw a red fox")
    draft = pretend.DeviceModel(tiny.engine.draft)
    draft.cache.rollback_(0)
    prefill(draft, prompt[:-1])
    root_pos = len(prompt) - 1
    meta_NM = draft.meta(1)
    pack_chain_(meta_NM, prompt[-1:], root_pos)
    candidates = [output[:1].clone() for output in draft.forward(meta_NM)]
    syncs.clear()
    seed = Seed(0, prompt[-1], root_pos, 4, 3, *candidates, UNSCALED, GREEDY)
    [(_, tree)] = grow_forest(draft, [[seed]])
    assert len(tree) == 13
    assert syncs == []
