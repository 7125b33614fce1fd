"""Measure latencies on this machine: every graph, and the host's part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch

from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import GenerateConfig
from yggdrasil.engine import Engine
from yggdrasil.models.packing import pack_chain_
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.policy.latency import Curve
from yggdrasil.policy.shape import ContextShape, FixedShape
from yggdrasil.policy.switching import SwitchTable
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.report.recording import RecordedModel
from yggdrasil.state import DecodeState, Row, Shape
from yggdrasil.step.growth import catch_up_rows_, prefill
from yggdrasil.step.verify import undrafted, verify_rows

__all__ = [
    "HOST_RUNS",
    "ROUNDS",
    "curve_json",
    "decision_milliseconds",
    "host_milliseconds",
    "in_step_curves",
    "latency_curve",
    "switch_grid",
    "switching_costs",
]

ROUNDS = 9
MIN_ROUNDS = 2
CURVE_SECONDS = 10.0  # no round of a curve starts later
HOST_RUNS = 4
RUN_SECONDS = 2.0  # no step of a measured text starts later
IN_STEP_MS = 20.0  # a target that takes longer fills the caches with its weights in a step, too
IN_STEP_WIDTH = 4
IN_STEP_STEPS = 8  # of each size
SWITCH_ROUNDS = 3
SWITCH_SECONDS = 0.5  # no round of a lag and batch size starts later
SWITCH_CHUNKS = 4  # most full draft graphs that are measured; more take time in proportion
LAGS = (2, 16, 64, 256)


def latency_curve(
    model: CompiledModel[Any],
    contexts: Sequence[int],
    tick: Callable[[int], None] = lambda count: None,
    *,
    num_before: int = 0,
) -> Curve:
    """Milliseconds of every graph of the menu at every context length.

    Graphs and contexts take turns, so drift affects all alike. Other programs only make a graph slower, so
    the lower quartile of the rounds is used. Isotonic regression removes the remaining noise: otherwise a
    wider graph could look faster than a narrower one, and decisions would jump between them. The values in
    the KV cache are arbitrary: latency does not depend on them.

    Args:
        model: Its cache is left empty.
        tick: Called with 1 after every timed forward, and with the number of forwards that are left out as
            soon as that is known: `ROUNDS` in all for each graph and context.
        num_before: Forwards of the same graph before each timed one. Growth repeats the draft's graph, so
            it finds the weights in the processor's caches; the target's were replaced by the draft's.

    Cost: `ROUNDS` rounds; fewer for a slow model, at least `MIN_ROUNDS`.
    """
    begin = time.perf_counter()
    samples: dict[tuple[int, int], list[float]] = {
        place: [] for place in product(contexts, model.menu.sizes)
    }
    rounds = ROUNDS
    done = 0
    while done < rounds:
        for (context, size), found in samples.items():
            meta_NM = model.meta(size)
            pack_chain_(meta_NM, [0] * size, max(0, min(context, model.cache.shape.capacity - size)))
            for _ in range(num_before):
                model.forward(meta_NM)
            _wait(model.device)
            start = time.perf_counter()
            model.forward(meta_NM)
            _wait(model.device)
            found.append((time.perf_counter() - start) * 1e3)
            tick(1)
        done += 1
        if time.perf_counter() - begin > CURVE_SECONDS:
            last = max(done, MIN_ROUNDS)
            tick((rounds - last) * len(samples))
            rounds = last
    quartiles = {place: sorted(found)[len(found) // 4] for place, found in samples.items()}
    rows = [_rising([quartiles[context, size] for size in model.menu.sizes]) for context in contexts]
    return Curve(tuple(contexts), model.menu.sizes, tuple(rows))


def in_step_curves(
    engine: Engine, prompt: Sequence[int], policy: FixedShape, *, max_depth: int
) -> tuple[Curve, Curve]:
    """The curves of draft and target, scaled to what forwards take within steps.

    Steps repeat a few graphs and call them from C++. In `latency_curve` all graphs take turns, and Python
    calls them. So there a target that fits in the processor's caches may take half as long again, and
    wide trees, which share that time among more tokens, look too good. Steps of one shape run for every
    size that a step verifies. A size's factor is the median of measured over expected milliseconds. Larger
    sizes get the factor of the largest.

    Args:
        policy: Its latency has both curves; its shape does not matter.

    Returns:
        The curves; as they were if one forward of the target takes over IN_STEP_MS.

    Cost: IN_STEP_STEPS steps for each size.
    """
    draft = policy.latency.draft
    verify = policy.latency.verify
    if verify.at(1, 0) > IN_STEP_MS:
        return draft, verify
    engine = _recorded(engine)
    width = min(IN_STEP_WIDTH, engine.draft.num_candidates)
    drafting: list[float] = []
    factors: list[float] = []
    sizes = [size for size in verify.sizes if size <= policy.verify_widths[-1]] or verify.sizes[:1]
    for size in sizes:
        depth = min(max_depth, max(1, -(-(size - 1) // width)))
        chosen = replace(policy, shape=Shape(width, depth, size))
        state = _prefilled(engine, prompt)
        verifying: list[float] = []
        for _ in range(IN_STEP_STEPS):
            if len(state.tokens) + depth + 1 > engine.max_context:
                state = _prefilled(engine, prompt)
            before = _clock(engine)
            result = engine.step(state, chosen)
            _, _, in_draft, in_target = (b - a for a, b in zip(before, _clock(engine), strict=True))
            context_len = result.context_len
            expected_ms = draft.at(2, context_len) + (depth - 1) * draft.at(width, context_len)
            drafting.append(in_draft / expected_ms)
            verifying.append(in_target / verify.at(result.verified, context_len))
        factors.append(median(verifying))
    factors += factors[-1:] * (len(verify.sizes) - len(factors))
    return _scaled(draft, [median(drafting)] * len(draft.sizes)), _scaled(verify, factors)


def _scaled(curve: Curve, factors: Sequence[float]) -> Curve:
    """The curve with a factor for each size, rising."""
    rows = [_rising([ms * factor for ms, factor in zip(row, factors, strict=True)]) for row in curve.ms]
    return replace(curve, ms=tuple(rows))


def _recorded(engine: Engine) -> Engine:
    """The engine with models that record their time; on CUDA they wait for the results, too."""
    models = (RecordedModel(model, "", []) for model in (engine.target, engine.draft))
    return Engine(*models, max_context=engine.max_context)


def _prefilled(engine: Engine, prompt: Sequence[int]) -> DecodeState:
    """The state of a text before its first step."""
    state = DecodeState(list(prompt))
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
        prefill(model, state.tokens[:-1])
    return state


def _rising(ms: Sequence[float]) -> tuple[float, ...]:
    """The nearest latencies that never decrease."""
    from sklearn.isotonic import IsotonicRegression

    return tuple(IsotonicRegression().fit_transform(range(len(ms)), ms).tolist())


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()  # sync: a latency is the time until the result has arrived


def host_milliseconds(
    engine: Engine,
    prompt: Sequence[int],
    policy: FixedShape,
    verify: Curve,
    *,
    num_tokens: int = 48,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """`plain_share`, and milliseconds outside the graphs: per growth step, speculative step, plain step.

    Args:
        policy: A speculative shape; it takes turns with plain decoding.
        verify: Latencies of the target. Steps of both kinds are compared with it, in turns, so a machine
            that was busy while it was measured changes `plain_share` little.
        num_tokens: Tokens of each run; fewer for a slow model.
        tick: Called after every run, `HOST_RUNS` times.
    """
    engine = _recorded(engine)
    samples: dict[str, list[float]] = {"growth_host_ms": [], "step_host_ms": [], "plain_host_ms": []}
    slowness: dict[bool, list[float]] = {True: [], False: []}  # of the target, by whether a draft ran
    for chosen in (policy, plain_policy()) * (HOST_RUNS // 2):
        state = _prefilled(engine, prompt)
        begin = time.perf_counter()
        while len(state.emitted) < num_tokens and time.perf_counter() - begin < RUN_SECONDS:
            before = _clock(engine)
            result = engine.step(state, chosen)
            after = _clock(engine)
            wall, drafting, in_draft, in_target = (b - a for a, b in zip(before, after, strict=True))
            expected_ms = verify.at(result.verified, result.context_len)
            slowness[result.shape.depth > 0].append(in_target / expected_ms)
            if result.shape.depth == 0:
                samples["plain_host_ms"].append(wall - in_target)
            else:
                samples["growth_host_ms"].append((drafting - in_draft) / result.shape.depth)
                samples["step_host_ms"].append(wall - drafting - in_target)
        tick()
    share = min(1.0, median(slowness[False]) / median(slowness[True]))
    return {**{name: median(values) for name, values in samples.items()}, "plain_share": share}


def decision_milliseconds(
    engine: Engine, prompt: Sequence[int], policy: ContextShape, *, num_tokens: int = 64
) -> float:
    """Milliseconds of a prediction and Eq. 3 with it, measured within steps, with caches full of weights.

    The rest of the step, and of `choose`, is in every policy's host time. The median, since other programs
    only add to it.
    """
    samples: list[float] = []
    timed = copy(policy)

    def shape_of(rows: Sequence[Row]) -> Shape:
        start = time.perf_counter()
        shape = policy.shape_of(rows)
        samples.append((time.perf_counter() - start) * 1e3)
        return shape

    timed.shape_of = shape_of  # type: ignore[method-assign]
    config = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True)
    _run(engine, prompt, policy, replace(config, max_new_tokens=2))  # builds the arms, once per process
    _run(engine, prompt, timed, config)
    return median(samples)


def _run(engine: Engine, prompt: Sequence[int], policy: ContextShape, config: GenerateConfig) -> None:
    """Decode to the end, or until `RUN_SECONDS` are over."""
    begin = time.perf_counter()
    for _ in engine.generate(prompt, policy, config):
        if time.perf_counter() - begin > RUN_SECONDS:
            return


def _clock(engine: Engine) -> tuple[float, float, float, float]:
    now = time.perf_counter() * 1e3
    return now, engine.trace.total_ms["draft"], engine.draft.graph_ms, engine.target.graph_ms


def switch_grid(max_lag: int, num_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lags and batch sizes of `switching_costs`."""
    return (*(lag for lag in LAGS if lag < max_lag), max_lag), tuple(
        2**power for power in range(num_rows.bit_length())
    )


def switching_costs(
    draft: TokenGraphs,
    target: TokenGraphs,
    max_lag: int,
    num_rows: int,
    tick: Callable[[], None] = lambda: None,
) -> SwitchTable:
    """c_prefill by lag and batch size: the time that a step takes longer when the draft catches up.

    The difference T_SD - T_base is measured inside one step: a forward of the target fills the processor's
    caches with its weights, then the catching up is timed. The difference of two whole steps would be lost
    in their noise.

    Args:
        draft: Draft over a page table of `num_rows` rows; they may share pages, since latency does not
            depend on values.
        target: Target over the same rows.
        max_lag: Longest lag that the pages hold.
        tick: Called after every lag and batch size.

    Cost: for every lag, the batch sizes up to `SWITCH_CHUNKS` full graphs of the draft; larger ones are
    extrapolated in proportion.
    Source: Nightjar section 4.2, "Prefill Cost Modeling".
    """
    lags, batch_sizes = switch_grid(max_lag, num_rows)
    rows = []
    for lag in lags:
        measured: dict[int, float] = {}
        for batch_size in batch_sizes:
            if not measured or lag * batch_size <= SWITCH_CHUNKS * draft.prefill_chunk:
                measured[batch_size] = _catch_up_ms(draft, target, lag, batch_size) / 1e3
            tick()
        most = max(measured)
        rows.append(
            tuple(
                measured.get(batch_size, measured[most] * batch_size / most) for batch_size in batch_sizes
            )
        )
    return SwitchTable(lags, batch_sizes, tuple(rows))


def _catch_up_ms(draft: TokenGraphs, target: TokenGraphs, lag: int, batch_size: int) -> float:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < SWITCH_ROUNDS and (not samples or time.perf_counter() - begin < SWITCH_SECONDS):
        rows = [Row(place, DecodeState([0] * (lag + 1)), target_len=lag) for place in range(batch_size)]
        verify_rows(target, rows, undrafted(target, rows), ())
        _wait(target.device)
        start = time.perf_counter()
        catch_up_rows_(draft, rows)
        _wait(draft.device)
        samples.append((time.perf_counter() - start) * 1e3)
    return median(samples)


def curve_json(curve: Curve) -> dict[str, Any]:
    """The form that `Curve.from_json` reads."""
    return {
        "contexts": list(curve.contexts),
        "sizes": list(curve.sizes),
        "ms": [list(row) for row in curve.ms],
    }
