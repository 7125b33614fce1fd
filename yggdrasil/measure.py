"""Measure this machine and this pair: latencies of every graph, acceptance on calibration text, the host's share of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.models.packing import pack_chain_
from yggdrasil.policy.acceptance import Acceptance, TreeRecord, fit_acceptance
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import FixedShape
from yggdrasil.state import PLAIN, DecodeState, Shape
from yggdrasil.step.draft import draft, prefill

__all__ = ["ROUNDS", "calibrate", "curve_json", "host_milliseconds", "latency_curve", "plain_policy"]

ROUNDS = 9
NO_LATENCY = LatencyModel(Curve((0,), (1,), ((1.0,),)), Curve((0,), (1,), ((1.0,),)), 0.0, 0.0, 0.0)
NO_ACCEPTANCE = Acceptance((0.0,), (1.0,), {})


def plain_policy() -> FixedShape:
    """Plain decoding, for which nothing has to be known yet."""
    return FixedShape(PLAIN, NO_ACCEPTANCE, NO_LATENCY, (1,))


def latency_curve(model: CompiledModel, contexts: Sequence[int], tick: Callable[[], None] = lambda: None) -> Curve:
    """Median milliseconds of every graph of the menu at every context length; sizes take turns, so drift hits all alike.

    The KV that is attended to is whatever the cache holds: latency does not depend on its values.

    Args:
        model: Its cache is left empty.
        contexts: Context lengths.
        tick: Called after every round.
    """
    rows = []
    for context in contexts:
        samples: dict[int, list[float]] = {size: [] for size in model.menu.sizes}
        for _ in range(ROUNDS):
            for size in model.menu.sizes:
                meta_NM = model.meta(size)
                pack_chain_(meta_NM, [0] * size, max(0, min(context, model.cache.shape.capacity - size)))
                start = time.perf_counter()
                model.forward(meta_NM)
                _wait(model.device)
                samples[size].append((time.perf_counter() - start) * 1e3)
            tick()
        rows.append(tuple(median(samples[size]) for size in model.menu.sizes))
    return Curve(tuple(contexts), model.menu.sizes, tuple(rows))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()  # sync: a latency is the time until the result is there


def calibrate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    num_tokens: int,
    widths: Sequence[int],
    max_depth: int,
    tick: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Calibrated acceptance: decode plainly once, then draft trees of every width along the text and see which nodes it passes.

    Args:
        engine: The pair.
        prompts: Token lists that the context holds with `num_tokens` and `max_depth` more.
        temperature: Of the target.
        num_tokens: Positions per prompt that get trees.
        widths: Widths to draft.
        max_depth: Depth of every tree; shallower ones are its beginnings.
        tick: Called after every prompt.
    """
    records: list[TreeRecord] = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingConfig(temperature=temperature, seed=index)
        config = GenerateConfig(max_new_tokens=num_tokens + max_depth, sampling=sampling, ignore_eos=True, plain=True)
        text = [*prompt, *(token for result in engine.generate(prompt, plain_policy(), config) for token in result.tokens)]
        engine.draft.cache.rollback_(0)
        for end in range(len(prompt), len(text) - max_depth):
            for width in widths:
                records.append(_record(engine, text, end, Shape(width, max_depth)))
        tick()
    return fit_acceptance(records)


def _record(engine: Engine, text: Sequence[int], end: int, shape: Shape) -> TreeRecord:
    """The tree after text[:end], judged by what really follows."""
    state = DecodeState(list(text[:end]))
    engine.draft.cache.rollback_(min(engine.draft.cache.len, end - 1))
    tree = draft(engine.draft, state, shape).tree
    says = torch.tensor([text[end + depth] if end + depth < len(text) else -1 for depth in tree.depth_N.tolist()])
    path = set(tree.walk(says))
    return TreeRecord(shape.width, tuple(tree.log_prob_N.tolist()), tuple(node in path for node in range(len(tree))))


def host_milliseconds(engine: Engine, prompt: Sequence[int], policy: FixedShape, *, num_tokens: int = 48) -> dict[str, float]:
    """What a step costs outside the graphs: per growth step, per speculative step, per plain step.

    Args:
        engine: Both models compiled.
        prompt: Any.
        policy: A speculative shape; plain decoding runs in turn with it.
        num_tokens: Tokens of each run.
    """
    samples: dict[str, list[float]] = {"growth_host_ms": [], "step_host_ms": [], "plain_host_ms": []}
    for chosen in (policy, plain_policy()) * 2:
        state = DecodeState(list(prompt))
        for model in (engine.target, engine.draft):
            model.cache.rollback_(0)
            prefill(model, state.tokens[:-1])
        while len(state.emitted) < num_tokens:
            before = _clock(engine)
            result = engine.step(state, chosen)
            after = _clock(engine)
            wall, drafting, in_draft, in_target = (b - a for a, b in zip(before, after, strict=True))
            if result.shape.depth == 0:
                samples["plain_host_ms"].append(wall - in_target)
            else:
                samples["growth_host_ms"].append((drafting - in_draft) / result.shape.depth)
                samples["step_host_ms"].append(wall - drafting - in_target)
    return {name: median(values) for name, values in samples.items()}


def _clock(engine: Engine) -> tuple[float, float, float, float]:
    now = time.perf_counter() * 1e3
    return now, engine.trace.total_ms["draft"], engine.draft.graph_ms, engine.target.graph_ms


def curve_json(curve: Curve) -> dict[str, Any]:
    """The form that `Curve.from_json` reads."""
    return {"contexts": list(curve.contexts), "sizes": list(curve.sizes), "ms": [list(row) for row in curve.ms]}
