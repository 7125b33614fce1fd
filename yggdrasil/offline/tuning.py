"""Measure and calibrate a compiled pair: acceptance, latencies, plans, a depth predictor.

Shapes: P = pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import CompileConfig
from yggdrasil.engine import Engine
from yggdrasil.kernels.threads import get_num_threads
from yggdrasil.kv import KVCache, KVShape, KVStorage
from yggdrasil.layout import PAGE_LEN
from yggdrasil.loading import load_draft, load_draft_weights, load_target, paged_storage
from yggdrasil.models.load import load_config
from yggdrasil.offline.budget import (
    CalibrationSize,
    PassClock,
    largest_within,
    seconds_of,
    seconds_of_sampling,
)
from yggdrasil.offline.depth_evaluation import evaluate
from yggdrasil.offline.depth_training import FOLDS, fit_predictor, held_out
from yggdrasil.offline.latencies import (
    HOST_RUNS,
    ROUNDS,
    curve_json,
    decision_milliseconds,
    host_milliseconds,
    in_step_curves,
    latency_curve,
    switch_grid,
    switching_costs,
)
from yggdrasil.offline.progress import Progress
from yggdrasil.offline.traces import (
    PROMPT_LEN,
    Passage,
    Traces,
    beginnings,
    drafted_traces,
    further_passages,
)
from yggdrasil.offline.written import write_texts
from yggdrasil.policy.acceptance import AcceptanceTable, fit_acceptance
from yggdrasil.policy.depth import PREDICTOR_FORMAT
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import ContextShape, FixedShape, best_shape
from yggdrasil.policy.switching import SwitchTable
from yggdrasil.schedule.choice import FORMAT, TEMPERATURES, choose_plans
from yggdrasil.schedule.workload import Workload
from yggdrasil.state import PLAIN, Shape
from yggdrasil.store import artifacts
from yggdrasil.text.tokenizer import Tokenizer

__all__ = [
    "CALIBRATION_TEMPERATURES",
    "calibrate",
    "collect",
    "draft_embedding",
    "save_learnt",
    "train_depth",
    "tune",
    "whole_size",
]

CALIBRATION_TEMPERATURES = (0.0, 1.0)
REFERENCE_WIDTH = 4
SWITCH_ROWS = 16  # largest batch size for which bringing the draft back is measured
MAX_LAG = 1024  # largest lag


def tune(
    bundle: Bundle,
    models: tuple[CompiledModel[KVCache], CompiledModel[KVCache]],
    texts: Sequence[str],
    progress: Progress,
) -> None:
    """Measure all that the policies of a pair use, then save it and the bundle, which becomes current.

    Args:
        bundle: A bundle whose files are built.
        models: Its target and draft.

    Raises:
        ConfigError: no text has two tokens.
    """
    engine = Engine(*models, max_context=bundle.max_context, eos_tokens=bundle.eos_tokens)
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.command)
    texts = texts[: bundle.config.calibration_texts]
    prompts = beginnings(texts, tokenizer, bundle.calibration)
    traces = collect(bundle, models, prompts, further_passages(texts, tokenizer), progress)
    acceptance = calibrate(traces, progress)
    profile = _profile(bundle, models, engine, prompts[0], acceptance, progress)
    latency = LatencyModel.from_json(profile)
    plan = _plan(bundle, engine, prompts[0], acceptance, latency, progress)
    predictor, report = train_depth(bundle, engine, prompts[0], traces, acceptance, latency, progress)
    _save(bundle, acceptance, profile, plan, predictor, report)


def collect(
    bundle: Bundle,
    models: tuple[CompiledModel[KVCache], CompiledModel[KVCache]],
    prompts: Sequence[Sequence[int]],
    further: Sequence[Passage],
    progress: Progress,
) -> list[Traces]:
    """Traces at every calibration temperature, as many as fit the budget.

    Args:
        prompts: One for each text; trees are drafted along what the target writes after it.
        further: More prompts from the same texts, for the depth predictor.
    """
    num_texts = len(prompts)
    whole = whole_size(bundle, num_texts, num_texts + len(further))
    prompts = [*prompts, *(passage.tokens for passage in further)]
    sources = [*range(num_texts), *(passage.text for passage in further)]
    tree_len = max(1 + max(whole.widths) * (whole.max_depth - 1), whole.max_depth)
    target, target_rows = _target_rows(
        bundle, models[0], num_texts * len(CALIBRATION_TEMPERATURES), PROMPT_LEN + whole.num_written
    )
    row_len = PROMPT_LEN + whole.num_tokens + tree_len
    draft_pages = _pages_of_rows(bundle, bundle.kv_draft, num_texts, row_len)
    draft = load_draft(bundle, draft_pages, models[1].weights)
    size, seconds = _affordable(
        bundle,
        whole,
        prompts,
        PassClock(target, target_rows),
        PassClock(draft, num_texts),
        target_rows,
        progress,
    )
    prompts = prompts[: size.num_passages]
    budget_s = bundle.config.calibration_budget_s
    num_trees = len(CALIBRATION_TEMPERATURES) * size.num_roots
    progress.note(
        f"calibration on {size.num_texts} texts ({size.num_passages} passages) and {num_trees} trees "
        f"takes about {seconds:.0f} s of a budget of {budget_s:g} s"
    )
    prompt_tokens = sum(map(len, prompts))
    num_written = prompt_tokens + size.num_passages * (size.num_written - 1)
    with progress.phase("write texts", len(CALIBRATION_TEMPERATURES) * num_written):
        texts = write_texts(
            target,
            prompts,
            CALIBRATION_TEMPERATURES,
            num_tokens=size.num_written,
            num_rows=target_rows,
            tick=progress.advance,
        )
    num_drafted = num_written + size.num_passages + size.num_tree_tokens
    with progress.phase("draft trees", len(CALIBRATION_TEMPERATURES) * num_drafted):
        return [
            drafted_traces(draft, texts[temperature], sources, temperature, size, tick=progress.advance)
            for temperature in CALIBRATION_TEMPERATURES
        ]


def whole_size(bundle: Bundle, num_texts: int, num_passages: int) -> CalibrationSize:
    """Size of the calibration without a budget."""
    config = bundle.config
    return CalibrationSize(
        num_texts=num_texts,
        num_passages=num_passages,
        num_tokens=max(
            1, min(config.calibration_tokens, bundle.max_context - PROMPT_LEN - config.max_depth)
        ),
        max_depth=config.max_depth,
        widths=config.widths,
        reference_width=_reference_width(config),
    )


def _affordable(
    bundle: Bundle,
    whole: CalibrationSize,
    prompts: Sequence[Sequence[int]],
    target: PassClock,
    draft: PassClock,
    target_rows: int,
    progress: Progress,
) -> tuple[CalibrationSize, float]:
    """Time some passes; return the largest size within the budget, and its estimated seconds."""

    def seconds(size: CalibrationSize) -> float:
        lens = [len(prompt) for prompt in prompts]
        return seconds_of(
            size,
            lens,
            CALIBRATION_TEMPERATURES,
            target,
            draft,
            target_rows=target_rows,
            sampling_s=sampling_s,
        )

    with progress.phase("time calibration passes", 1):
        target(target_rows)
        sampling_s = seconds_of_sampling(target.num_columns)
        size = largest_within(whole, seconds, bundle.config.calibration_budget_s)
        return size, seconds(size)


def _target_rows(
    bundle: Bundle, target: CompiledModel[KVCache], num_texts: int, row_len: int
) -> tuple[CompiledModel[KVCache] | CompiledModel[KVStorage], int]:
    """The target over pages with as many rows as fit, and their number; one row if ranks share it."""
    if bundle.config.ranks > 1:
        target.cache.rollback_(0)
        return target, 1
    num_rows = min(num_texts, target.prefill_chunk)
    return load_target(bundle, _pages_of_rows(bundle, bundle.kv_target, num_rows, row_len)), num_rows


def _pages_of_rows(bundle: Bundle, kv: KVShape, num_rows: int, row_len: int) -> KVStorage:
    """Storage for rows of `row_len` indices, each with its own pages."""
    pages = -(-row_len // PAGE_LEN)
    pages_BP = torch.zeros(num_rows, kv.num_pages, dtype=torch.int32)
    pages_BP[:, :pages] = torch.arange(num_rows * pages, dtype=torch.int32).view(num_rows, pages)
    return paged_storage(bundle, kv, pages_BP.to(bundle.config.device), num_rows * pages)


def _reference_width(config: CompileConfig) -> int:
    """Width of the trees for the depth predictor: a middle one, since it is scaled to the others."""
    return max((width for width in config.widths if width <= REFERENCE_WIDTH), default=config.widths[0])


def calibrate(traces: Sequence[Traces], progress: Progress) -> AcceptanceTable:
    """Acceptance by temperature, from drafted trees."""
    with progress.phase("calibrate acceptance", 1):
        return AcceptanceTable(
            {trace.temperature: fit_acceptance(trace.sampled, trace.platt) for trace in traces}
        )


def _profile(
    bundle: Bundle,
    models: tuple[CompiledModel[KVCache], CompiledModel[KVCache]],
    engine: Engine,
    prompt: Sequence[int],
    acceptance: AcceptanceTable,
    progress: Progress,
) -> dict[str, Any]:
    """Measured latencies, as `LatencyModel.from_json` reads them, and the switching costs."""
    contexts = sorted(
        {min(64, bundle.max_context // 2), 512, bundle.max_context - bundle.config.prefill_chunk}
        & set(range(1, bundle.max_context))
    )
    with progress.phase(
        "measure latencies", ROUNDS * len(contexts) * sum(len(model.menu.sizes) for model in models)
    ):
        draft = latency_curve(models[1], contexts, progress.advance, num_before=1)
        verify = latency_curve(models[0], contexts, progress.advance)
        alone = _typical(bundle, acceptance, LatencyModel(draft, verify, 0.0, 0.0, 0.0))
        draft, verify = in_step_curves(engine, prompt, alone, max_depth=bundle.config.max_depth)
    switching = _switching(bundle, progress)
    latency = LatencyModel(draft, verify, 0.0, 0.0, 0.0)
    with progress.phase("measure the host", HOST_RUNS):
        host = host_milliseconds(
            engine, prompt, _typical(bundle, acceptance, latency), tick=progress.advance
        )
    curves = {"draft": curve_json(draft), "verify": curve_json(verify), "switching": switching.to_json()}
    return {"machine": bundle.machine, "threads": get_num_threads(), **curves, **host}


def _switching(bundle: Bundle, progress: Progress) -> SwitchTable:
    """Switching costs; every row reads the same pages, since latency does not depend on values."""
    if bundle.config.ranks > 1:
        return SwitchTable((1,), (1,), ((0.0,),))  # a server runs on one rank
    max_lag = min(MAX_LAG, bundle.max_context - 1)
    pages_P = torch.arange(bundle.kv_target.num_pages, dtype=torch.int32, device=bundle.config.device)
    pages_BP = pages_P.repeat(SWITCH_ROWS, 1)
    num_pages = bundle.kv_target.num_pages
    target = load_target(bundle, paged_storage(bundle, bundle.kv_target, pages_BP, num_pages))
    weights = load_draft_weights(bundle, bundle.config.device)
    draft = load_draft(bundle, paged_storage(bundle, bundle.kv_draft, pages_BP, num_pages), weights)
    num_rows = min(SWITCH_ROWS, target.prefill_chunk)
    lags, batch_sizes = switch_grid(max_lag, num_rows)
    with progress.phase("measure catching up", len(lags) * len(batch_sizes)):
        return switching_costs(draft, target, max_lag, num_rows, progress.advance)


def _typical(bundle: Bundle, acceptance: AcceptanceTable, latency: LatencyModel) -> FixedShape:
    """The best shape of greedy decoding; some tree if plain decoding is best."""
    config = bundle.config
    calibrated = acceptance.nearest(0.0)
    shape, _ = best_shape(
        calibrated, latency, widths=config.widths, verify_widths=config.verify_widths, context_len=64
    )
    shape = shape if shape.depth else Shape(config.widths[-1], min(4, config.max_depth))
    return FixedShape(shape, calibrated, latency, config.verify_widths)


def _typical_verify(policy: FixedShape) -> int:
    """The best K of a shape, on average."""
    width = policy.shape.width
    depth = policy.shape.depth
    menu = sorted({min(verify, 1 + width * depth) for verify in policy.verify_widths})
    return max(
        menu,
        key=lambda verify: (
            policy.acceptance.expected_emitted(width, depth, verify)
            / policy.latency.step_ms(width, depth, verify, 64)
        ),
    )


def _plan(
    bundle: Bundle,
    engine: Engine,
    prompt: Sequence[int],
    acceptance: AcceptanceTable,
    latency: LatencyModel,
    progress: Progress,
) -> dict[str, Any]:
    """Search the plans of an iteration."""
    policy = _typical(bundle, acceptance, latency)
    verify = _typical_verify(policy)  # fixed, so that every run does the same work
    shape = replace(policy.shape, verify=verify)
    work = Workload(
        target=engine.target,
        draft=engine.draft,
        step=engine.step,
        step_ms=latency.step_ms(shape.width, shape.depth, verify, len(prompt)),
        prompt=prompt,
        policy=replace(policy, shape=shape),
        max_context=bundle.max_context,
    )
    with progress.phase("search the plan", len(TEMPERATURES)):
        choice = choose_plans(work, tick=progress.advance)
    return {"format": FORMAT, "shape": str(shape), **asdict(choice)}


def train_depth(
    bundle: Bundle,
    engine: Engine,
    prompt: Sequence[int],
    traces: Sequence[Traces],
    acceptance: AcceptanceTable,
    latency: LatencyModel,
    progress: Progress,
) -> tuple[bytes, dict[str, Any]]:
    """Fit the depth predictor and evaluate it on held-out texts; returns its weights and the report."""
    config = bundle.config
    max_depth = min(each.max_depth for each in acceptance.by_temperature.values())
    may_stop = config.device == "cpu"  # on CUDA the host would wait for the draft after every step
    with progress.phase("train depth predictor", FOLDS + 2 + len(traces)):
        embedding_VE = draft_embedding(bundle)
        judged = held_out(traces, max_depth, embedding_VE, progress.advance)
        predictor = fit_predictor(
            traces,
            max_depth,
            embedding_VE,
            slopes={each.trace.temperature: each.slope_D for each in judged},
            trust={each.trace.temperature: each.trust for each in judged},
        )
        progress.advance()
        policy = ContextShape(
            shape=PLAIN,
            acceptance=acceptance.nearest(0.0),
            latency=latency,
            verify_widths=config.verify_widths,
            widths=config.widths,
            predictor=predictor,
            temperature=0.0,
        )
        cost_ms = decision_milliseconds(
            engine, prompt, policy, num_tokens=min(64, bundle.max_context - len(prompt))
        )
        progress.advance()
        held_out_by_temperature = {}
        for each in judged:
            found = evaluate(each, latency, config.verify_widths, decision_ms=cost_ms, may_stop=may_stop)
            held_out_by_temperature[str(each.trace.temperature)] = found
            progress.advance()
    return predictor.to_bytes(), {
        "reference_width": _reference_width(config),
        "decision_ms": cost_ms,
        "held_out": held_out_by_temperature,
    }


def draft_embedding(bundle: Bundle) -> Tensor:
    """The draft's input embedding, (V, E), on the host: that of the bundle's weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            load_config(bundle.models[-1]), trust_remote_code=False
        )
    table = model.get_input_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is table)
    return load_draft_weights(bundle, "cpu")[f"model.{name}"][: bundle.vocab]


def save_learnt(
    bundle: Bundle, acceptance: AcceptanceTable, predictor: bytes, report: dict[str, Any]
) -> None:
    """Save acceptance and depth predictor of the bundle's calibration text."""
    text = {"fingerprint": bundle.folder.name, "dataset": bundle.dataset, "calibration": bundle.calibration}
    by_temperature = {
        str(temperature): calibrated.to_json()
        for temperature, calibrated in acceptance.by_temperature.items()
    }
    folder = bundle.predictor_folder(bundle.dataset)
    artifacts.save_json(folder / "acceptance.json", {**text, "by_temperature": by_temperature})
    artifacts.save_bytes(folder / "predictor.safetensors", predictor)
    artifacts.save_json(
        folder / "predictor.json",
        {
            "format": PREDICTOR_FORMAT,
            **text,
            "weights_digest": artifacts.digest_file(folder / "predictor.safetensors"),
            **report,
        },
    )


def _save(
    bundle: Bundle,
    acceptance: AcceptanceTable,
    profile: dict[str, Any],
    plan: dict[str, Any],
    predictor: bytes,
    report: dict[str, Any],
) -> None:
    """Save all measurements, then the bundle.

    An earlier build of the pair uses the same files, so they are written together, at the end.
    """
    mark = {"fingerprint": bundle.folder.name}
    save_learnt(bundle, acceptance, predictor, report)
    artifacts.save_json(bundle.profile_path, {**mark, **profile})
    artifacts.save_json(bundle.plan_path, {**mark, **plan})
    bundle.save()
