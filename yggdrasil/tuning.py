"""What is measured of a compiled pair and learnt: acceptance, latencies, plans, a depth predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from yggdrasil import artifacts
from yggdrasil.bundle import Bundle
from yggdrasil.calibration import PROMPT_LEN, Traces, beginnings, collect_traces
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import CompileConfig
from yggdrasil.depth_training import evaluate, fit_predictor, held_out
from yggdrasil.engine import Engine
from yggdrasil.kv import KVCache
from yggdrasil.measure import ROUNDS, curve_json, decision_milliseconds, host_milliseconds, latency_curve, switching_costs
from yggdrasil.policy.acceptance import AcceptanceTable, fit_acceptance
from yggdrasil.policy.gamma.switching import SwitchTable
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import ContextShape, FixedShape, best_shape
from yggdrasil.progress import Progress
from yggdrasil.schedule.choice import FORMAT, TEMPERATURES, choose_plans
from yggdrasil.schedule.workload import Workload
from yggdrasil.state import PLAIN, Shape
from yggdrasil.tokenizer import Tokenizer

__all__ = ["tune"]

CALIBRATION_TEMPERATURES = (0.0, 1.0)
REFERENCE_WIDTH = 4
WRITING_CHOICE = 3  # texts are written with the third of the verified widths
SWITCH_ROWS, MAX_LAG = 16, 1024  # how far the cost of bringing the draft back is measured


def tune(bundle: Bundle, models: tuple[CompiledModel[KVCache], CompiledModel[KVCache]], texts: Sequence[str], progress: Progress) -> None:
    """Measure and learn what the policies of a compiled pair decide by, and write it together with the bundle, which is then current.

    Args:
        bundle: Its graphs and weights are there.
        models: Target and draft of it.
        texts: Of the calibration.
        progress: Told about every phase.

    Raises:
        ConfigError: no text has two tokens.
    """
    engine = Engine(*models, max_context=bundle.max_context, eos_tokens=bundle.eos_tokens)
    prompts = beginnings(texts[: bundle.config.calibration_texts], Tokenizer(bundle.tokenizer_path, bundle.command), bundle.calibration)
    traces = _collect(bundle, engine, prompts, progress)
    acceptance = _calibrate(traces, progress)
    profile = _profile(bundle, models, engine, prompts[0], acceptance, progress)
    latency = LatencyModel.from_json(profile)
    plan = _plan(bundle, engine, prompts[0], acceptance, latency, progress)
    predictor, report = _train_depth(bundle, engine, prompts[0], traces, acceptance, latency, progress)
    _save(bundle, acceptance, profile, plan, predictor, report)


def _collect(bundle: Bundle, engine: Engine, prompts: Sequence[Sequence[int]], progress: Progress) -> list[Traces]:
    """Traces at every calibration temperature."""
    config = bundle.config
    num_tokens = max(1, min(config.calibration_tokens, bundle.max_context - PROMPT_LEN - config.max_depth))
    # Nothing is measured yet, but the menu knows whether a wide pass is cheap here.
    writing = Shape(_reference_width(config), min(6, config.max_depth), config.verify_widths[:WRITING_CHOICE][-1])
    with progress.phase("collect traces", 2 * len(prompts) * len(CALIBRATION_TEMPERATURES)):
        return [
            collect_traces(
                engine,
                prompts,
                temperature=temperature,
                num_tokens=num_tokens,
                widths=config.widths,
                reference_width=_reference_width(config),
                max_depth=config.max_depth,
                writing=writing,
                tick=progress.advance,
            )
            for temperature in CALIBRATION_TEMPERATURES
        ]


def _reference_width(config: CompileConfig) -> int:
    """Width of the trees whose accepted length is predicted: of middle size, for it is scaled to the others."""
    return max((width for width in config.widths if width <= REFERENCE_WIDTH), default=config.widths[0])


def _calibrate(traces: Sequence[Traces], progress: Progress) -> AcceptanceTable:
    with progress.phase("calibrate acceptance", 1):
        return AcceptanceTable({trace.temperature: fit_acceptance(trace.sampled, trace.platt) for trace in traces})


def _profile(
    bundle: Bundle,
    models: tuple[CompiledModel[KVCache], CompiledModel[KVCache]],
    engine: Engine,
    prompt: Sequence[int],
    acceptance: AcceptanceTable,
    progress: Progress,
) -> dict[str, Any]:
    """What `LatencyModel.from_json` reads, and the table of switching costs."""
    contexts = sorted({min(64, bundle.max_context // 2), 512, bundle.max_context - bundle.config.prefill_chunk} & set(range(1, bundle.max_context)))
    with progress.phase("measure latencies", 2 * ROUNDS + 1):
        draft = latency_curve(models[1], contexts, progress.advance)
        verify = latency_curve(models[0], contexts, progress.advance)
        switching = _switching(bundle)
        progress.advance()
    latency = LatencyModel(draft, verify, 0.0, 0.0, 0.0)
    host = host_milliseconds(engine, prompt, _typical(bundle, acceptance, latency))
    curves = {"draft": curve_json(draft), "verify": curve_json(verify), "switching": switching.to_json()}
    return {"machine": bundle.machine, **curves, **host}


def _switching(bundle: Bundle) -> SwitchTable:
    """Every row reads the same pages: latency does not depend on what they hold."""
    if bundle.config.ranks > 1:
        return SwitchTable((1,), (1,), ((0.0,),))  # nothing is served over several ranks
    max_lag = min(MAX_LAG, bundle.max_context - 1)
    pages_BP = torch.arange(bundle.kv_target.num_pages, dtype=torch.int32, device=bundle.config.device).repeat(SWITCH_ROWS, 1)
    target = bundle.load_target(bundle.paged_storage(bundle.kv_target, pages_BP, pages_BP.shape[1]))
    weights = bundle.load_draft_weights(bundle.config.device)
    draft = bundle.load_draft(bundle.paged_storage(bundle.kv_draft, pages_BP, pages_BP.shape[1]), weights)
    return switching_costs(draft, target, max_lag, min(SWITCH_ROWS, target.prefill_chunk))


def _typical(bundle: Bundle, acceptance: AcceptanceTable, latency: LatencyModel) -> FixedShape:
    """The shape that greedy decoding will mostly use, or some tree where that is none."""
    config, calibrated = bundle.config, acceptance.nearest(0.0)
    shape, _ = best_shape(calibrated, latency, widths=config.widths, verify_widths=config.verify_widths, context_len=64)
    shape = shape if shape.depth else Shape(config.widths[-1], min(4, config.max_depth))
    return FixedShape(shape, calibrated, latency, config.verify_widths)


def _typical_verify(policy: FixedShape) -> int:
    """The K that is best for a shape on average."""
    width, depth = policy.shape.width, policy.shape.depth
    menu = sorted({min(verify, 1 + width * depth) for verify in policy.verify_widths})
    return max(menu, key=lambda verify: policy.acceptance.expected_emitted(width, depth, verify) / policy.latency.step_ms(width, depth, verify, 64))


def _plan(bundle: Bundle, engine: Engine, prompt: Sequence[int], acceptance: AcceptanceTable, latency: LatencyModel, progress: Progress) -> dict[str, Any]:
    """Search the plans of an iteration; they lie with the profile, for they are this machine's."""
    policy = _typical(bundle, acceptance, latency)
    verify = _typical_verify(policy)  # not left to pruning: every run must do the same work
    shape = replace(policy.shape, verify=verify)
    work = Workload(
        target=engine.target,
        draft=engine.draft,
        step=engine.fast_step,
        step_ms=latency.step_ms(shape.width, shape.depth, verify, len(prompt)),
        prompt=prompt,
        policy=replace(policy, shape=shape),
        max_context=bundle.max_context,
    )
    with progress.phase("search the plan", len(TEMPERATURES)):
        choice = choose_plans(work, tick=progress.advance)
    return {"format": FORMAT, "shape": str(shape), **asdict(choice)}


def _train_depth(
    bundle: Bundle, engine: Engine, prompt: Sequence[int], traces: Sequence[Traces], acceptance: AcceptanceTable, latency: LatencyModel, progress: Progress
) -> tuple[bytes, dict[str, Any]]:
    """Fit the depth predictor and judge it on held-out texts with what it costs: its weights, and the report."""
    config = bundle.config
    with progress.phase("train depth predictor", 1):
        judged = held_out(traces, config.max_depth)
        predictor = fit_predictor(traces, config.max_depth, trust={each.trace.temperature: each.trust for each in judged})
        policy = ContextShape(
            shape=PLAIN,
            acceptance=acceptance.nearest(0.0),
            latency=latency,
            verify_widths=config.verify_widths,
            widths=config.widths,
            predictor=predictor,
            temperature=0.0,
        )
        cost_ms = decision_milliseconds(engine, prompt, policy, num_tokens=min(64, bundle.max_context - len(prompt)))
    may_stop = config.device == "cpu"  # elsewhere the host would wait for the draft after every step
    held_out_by_temperature = {
        str(each.trace.temperature): evaluate(each, latency, config.verify_widths, decision_ms=cost_ms, may_stop=may_stop) for each in judged
    }
    return predictor.to_bytes(), {"reference_width": _reference_width(config), "decision_ms": cost_ms, "held_out": held_out_by_temperature}


def _save(bundle: Bundle, acceptance: AcceptanceTable, profile: dict[str, Any], plan: dict[str, Any], predictor: bytes, report: dict[str, Any]) -> None:
    """Write what was measured, then the bundle: these files belong to the pair, not to a fingerprint, and half of them would break an earlier one."""
    mark = {"fingerprint": bundle.folder.name}
    text = {**mark, "dataset": bundle.dataset, "calibration": bundle.calibration}
    by_temperature = {str(temperature): calibrated.to_json() for temperature, calibrated in acceptance.by_temperature.items()}
    folder = bundle.predictor_folder(bundle.dataset)
    artifacts.save_json(folder / "acceptance.json", {**text, "by_temperature": by_temperature})
    artifacts.save_bytes(folder / "predictor.safetensors", predictor)
    artifacts.save_json(folder / "predictor.json", {**text, "weights_digest": artifacts.digest_file(folder / "predictor.safetensors"), **report})
    artifacts.save_json(bundle.profile_path, {**mark, **profile})
    artifacts.save_json(bundle.plan_path, {**mark, **plan})
    bundle.save()
