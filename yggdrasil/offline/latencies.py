"""Measure latencies on this machine: every graph, and the host's part of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from yggdrasil.policy.latency import Curve, LatencyModel
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
HOST_RUNS = 8
HOST_SECONDS = 1.0  # no step of such a run starts later
RUN_SECONDS = 2.0  # no step of a measured text starts later
IN_STEP_MS = 20.0  # a target that takes longer fills the caches with its weights in a step, too
IN_STEP_WIDTH = 4
IN_STEP_TURNS = 8
IN_STEP_STEPS = 2  # of each size in each turn
MIN_FACTOR = 0.25  # a measured factor below was disturbed by another program
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
    wide trees, which share that time among more tokens, look too good. The sizes that a step verifies take
    turns, so drift affects all alike. A size's factor is the median of measured over expected milliseconds.
    Larger sizes get the factor of the largest. The draft's factor is that of the forwards after a step's
    first one; `host_milliseconds` has the rest of the first.

    Args:
        policy: Its latency has both curves; its shape does not matter.

    Returns:
        The curves; as they were if one forward of the target takes over IN_STEP_MS.

    Cost: IN_STEP_TURNS * IN_STEP_STEPS steps for each size.
    """
    draft = policy.latency.draft
    verify = policy.latency.verify
    if verify.at(1, 0) > IN_STEP_MS:
        return draft, verify
    engine = _recorded(engine)
    width = min(IN_STEP_WIDTH, engine.draft.num_candidates)
    sizes = [size for size in verify.sizes if size <= policy.verify_widths[-1]] or verify.sizes[:1]
    drafting: dict[int, list[float]] = defaultdict(list)
    verifying: dict[int, list[float]] = defaultdict(list)
    state = _prefilled(engine, prompt)
    for size in [*sizes] * IN_STEP_TURNS:
        depth = min(max_depth, max(1, -(-(size - 1) // width)))
        chosen = replace(policy, shape=Shape(width, depth, size))
        for _ in range(IN_STEP_STEPS):
            if len(state.tokens) + depth + 1 > engine.max_context:
                state = _prefilled(engine, prompt)
            before = _clock(engine)
            result = engine.step(state, chosen)
            _, _, in_draft, in_target = (b - a for a, b in zip(before, _clock(engine), strict=True))
            drafting[depth].append(in_draft)
            verifying[size].append(in_target / verify.at(result.verified, result.context_len))
    growth_ms = draft.at(width, len(state.tokens))
    drafted = _scaled(draft, [_growth_factor(drafting, growth_ms)] * len(draft.sizes))
    factors = [median(verifying[size]) for size in sizes]
    factors += factors[-1:] * (len(verify.sizes) - len(factors))
    return drafted, _scaled(verify, factors)


def _growth_factor(drafting: Mapping[int, Sequence[float]], growth_ms: float) -> float:
    """Measured over expected milliseconds of a growth step, by what deeper trees took longer.

    Args:
        drafting: Milliseconds of the draft's forwards, by depth.
        growth_ms: Expected milliseconds of each growth step.

    Returns:
        At least MIN_FACTOR; 1 where all trees have the same depth.
    """
    low = min(drafting)
    high = max(drafting)
    if low == high:
        return 1.0
    measured_ms = (median(drafting[high]) - median(drafting[low])) / (high - low)
    return max(MIN_FACTOR, measured_ms / growth_ms)


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
    *,
    num_tokens: int = 32,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The numbers of `LatencyModel` that are no curves: milliseconds outside the graphs, and `plain_share`.

    Args:
        policy: A speculative shape; it takes turns with plain decoding. Its latency has the final curves
            and no host times. Steps of both kinds are compared with it, so a machine that is busy for some
            time changes `plain_share` little.
        num_tokens: Tokens of each run; fewer for a slow model.
        tick: Called after every run, `HOST_RUNS` times.
    """
    engine = _recorded(engine)
    samples: dict[str, list[float]] = {"growth_host_ms": [], "step_host_ms": [], "plain_host_ms": []}
    shares: list[float] = []
    for _ in range(HOST_RUNS // 2):
        slowness: list[float] = []  # of the target, after a draft and without one
        for chosen in (policy, plain_policy()):
            slowness.append(_host_run(engine, prompt, chosen, policy.latency, num_tokens, samples))
            tick()
        shares.append(slowness[1] / slowness[0])
    return {
        # `step_host_ms` would be negative where the draft took less than expected
        **{name: max(0.0, median(values)) for name, values in samples.items()},
        "plain_share": min(1.0, median(shares)),
    }


def _host_run(
    engine: Engine,
    prompt: Sequence[int],
    policy: FixedShape,
    expected: LatencyModel,
    num_tokens: int,
    samples: Mapping[str, list[float]],
) -> float:
    """Add the host's milliseconds of one text's steps to `samples`.

    A speculative step's time includes what the draft's forwards took longer than expected: the first one
    finds the target's weights in the processor's caches.

    Returns:
        Measured over expected milliseconds of the target.
    """
    state = _prefilled(engine, prompt)
    begin = time.perf_counter()
    slowness: list[float] = []
    while len(state.emitted) < num_tokens and time.perf_counter() - begin < HOST_SECONDS:
        before = _clock(engine)
        result = engine.step(state, policy)
        wall, drafting, in_draft, in_target = (b - a for a, b in zip(before, _clock(engine), strict=True))
        context_len = result.context_len
        width = result.shape.width
        depth = result.shape.depth
        slowness.append(in_target / expected.verify.at(result.verified, context_len))
        if depth == 0:
            samples["plain_host_ms"].append(wall - in_target)
            continue
        expected_ms = expected.before_verify_ms(width, depth, context_len)
        samples["growth_host_ms"].append((drafting - in_draft) / depth)
        samples["step_host_ms"].append(wall - (drafting - in_draft) - expected_ms - in_target)
    return median(slowness)


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
