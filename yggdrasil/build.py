"""The offline half: what `ygg compile` does, phase by phase.

Packed weights and graphs are kept when it is broken off: the next run goes on behind them. Measurements are taken from the start, and written
together with the bundle at the very end, so that until then a pair that was compiled before stays as it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from yggdrasil import artifacts
from yggdrasil.bundle import BUNDLED, Bundle, SourceFile, bundled_models, load_bundle, machine_fields
from yggdrasil.calibration import Traces, collect_traces
from yggdrasil.compiler.buckets import Menu, draft_menu, target_menu
from yggdrasil.compiler.model import CompiledModel, graph_path
from yggdrasil.compiler.pool import GraphJob, compile_graphs
from yggdrasil.compiler.weights import FILE_NAME, has_weights, save_weights
from yggdrasil.config import CompileConfig
from yggdrasil.depth_training import evaluate, fit_predictor, held_out
from yggdrasil.engine import Engine
from yggdrasil.errors import ArtifactError, ConfigError, ModelMismatch
from yggdrasil.exactness import inexact_widths
from yggdrasil.kernels import load_kernels
from yggdrasil.kv import KVCache, KVShape
from yggdrasil.layout import PAGE_LEN
from yggdrasil.measure import ROUNDS, curve_json, decision_milliseconds, host_milliseconds, latency_curve, switching_costs
from yggdrasil.models.load import check_vocabularies, kv_shape, load_config, load_model, pack_linears_, shared_vocab
from yggdrasil.models.sharding import check_divisible, shard_
from yggdrasil.pair import load_measurements
from yggdrasil.policy.acceptance import AcceptanceTable, fit_acceptance
from yggdrasil.policy.gamma.switching import SwitchTable
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import ContextShape, FixedShape, best_shape
from yggdrasil.schedule.choice import NUM_TICKS, choose_plan
from yggdrasil.schedule.profile import Workload
from yggdrasil.state import PLAIN, Shape
from yggdrasil.tokenizer import Tokenizer, load_tokenizer

__all__ = ["CALIBRATION_TEXT", "Progress", "bundled_arguments", "compile_pair", "read_texts", "resolved"]

CALIBRATION_TEXT = Path(__file__).parent / "data" / "calibration.jsonl"
BUNDLED_TEXT = "stories"  # name of the data set that it is
CALIBRATION_TEMPERATURES = (0.0, 1.0)
REFERENCE_WIDTH = 4
PROMPT_LEN = 24  # tokens of a calibration text that serve as its prompt
DEFAULT_MAX_CONTEXT = 2048
LOCK_NAME = "compiling.lock"  # in the folder of the pair
WORKER_BYTES = 3 * 2**29  # a CUDA context, its libraries, two pages of KV
SWITCH_ROWS, MAX_LAG = 16, 1024  # how far the cost of bringing the draft back is measured


class Progress(Protocol):
    """Where a compilation reports: one phase at a time, in steps."""

    def phase(self, name: str, total: int) -> AbstractContextManager[Any]:
        """A block during which `advance` counts up to `total`."""
        ...

    def advance(self) -> None: ...


def compile_pair(target: str, draft: str, *, name: str, config: CompileConfig, calibration: Path = CALIBRATION_TEXT, progress: Progress) -> Bundle:
    """Lower, measure and calibrate a pair; weights and graphs of an earlier, interrupted run are kept. An earlier pair of this name stays until the end.

    Args:
        target: Folder or hub id of the target.
        draft: Folder or hub id of the draft.
        name: Of the pair.
        config: Menu, dtype, device, limits.
        calibration: Text of the domain: a `.jsonl` with a "text" in every line, or plain text.
        progress: Told about every phase.

    Returns:
        The bundle, saved and current. Where another process is compiling a pair of this name it is waited for, and if it was this very pair, that is it.

    Raises:
        ConfigError, ModelMismatch, UnsupportedModel: before anything is written.
        RuntimeError: a graph could not be built.
    """
    with progress.phase("check the pair", 1):
        bundle = _describe(target, draft, name, config, calibration)
        texts = read_texts(calibration)
    with artifacts.one_at_a_time(bundle.folder.parent / LOCK_NAME, progress.phase("wait for another run", 1)) as waited:
        return (_compiled_meanwhile(bundle) if waited else None) or _compile(bundle, texts, progress)


def _compiled_meanwhile(bundle: Bundle) -> Bundle | None:
    """The pair as another process finished it, if it is the same to the last option."""
    try:
        done = load_bundle(bundle.name)
        load_measurements(done, done.dataset)
    except ArtifactError:
        return None  # it broke off, or compiled something else
    return done if replace(done, inexact_widths=()) == bundle else None


def _compile(bundle: Bundle, texts: Sequence[str], progress: Progress) -> Bundle:
    with progress.phase("compile operators", 1):
        load_kernels()
    _build_models(bundle, progress)
    models = bundle.load_models()
    bundle = replace(bundle, inexact_widths=_check_exactness(models[0], progress))
    engine = Engine(*models, max_context=bundle.max_context, eos_tokens=bundle.eos_tokens)
    prompts = _prompts(bundle, texts)
    traces = _collect(bundle, engine, prompts, progress)
    acceptance = _calibrate(traces, progress)
    profile = _profile(bundle, models, engine, prompts[0], acceptance, progress)
    latency = LatencyModel.from_json(profile)
    plan = _plan(bundle, engine, prompts[0], acceptance, latency, progress)
    predictor, report = _train_depth(bundle, engine, prompts[0], traces, acceptance, latency, progress)
    _save(bundle, acceptance, profile, plan, predictor, report)
    return bundle


def _describe(target: str, draft: str, name: str, config: CompileConfig, calibration: Path) -> Bundle:
    """Check everything that can be wrong with the input, and settle what is to be built."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "cpu on this machine: torch sees no CUDA device", "ygg compile TARGET DRAFT --device cpu")
    target, draft = resolved(target), resolved(draft)
    target_config, draft_config = load_config(target), load_config(draft)
    check_divisible(target_config, config.ranks)
    tokenizer = load_tokenizer(target)
    check_vocabularies(target_config, draft_config, _common_ids(tokenizer, draft))
    config = replace(config, max_context=_max_context(config, target_config, draft_config))
    assert config.max_context is not None
    capacity = (config.max_context + config.max_nodes + PAGE_LEN - 1) // PAGE_LEN * PAGE_LEN
    kv_target, kv_draft = _of_a_rank(kv_shape(target_config, capacity), config.ranks), kv_shape(draft_config, capacity)
    sources = [[SourceFile.of(path) for path in _model_files(model)] for model in (target, draft)]
    origins = [_origin(model, files) for model, files in zip((target, draft), sources, strict=True)]
    machine = machine_fields()
    fingerprint = artifacts.digest(*origins, asdict(kv_target), asdict(kv_draft), config.lowering, machine)
    return Bundle(
        name=name,
        folder=artifacts.compile_cache() / name / fingerprint,
        config=config,
        dataset=BUNDLED_TEXT if calibration == CALIBRATION_TEXT else calibration.stem,
        calibration="" if calibration == CALIBRATION_TEXT else str(calibration.resolve()),
        kv_target=kv_target,
        kv_draft=kv_draft,
        eos_tokens=_eos_tokens(target, tokenizer),
        sources=tuple(file for files in sources for file in files),
        models=(target, draft),
        machine=machine,
    )


def _of_a_rank(whole: KVShape, ranks: int) -> KVShape:
    return replace(whole, num_kv_heads=whole.num_kv_heads // ranks)


def resolved(model: str) -> str:
    """A local folder's absolute path; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _common_ids(tokenizer: Any, draft: str) -> int | None:
    """One more than the greatest id of the tokenizer that both models have; None for a draft without one of its own, which is trained on the target's."""
    if Path(draft).is_dir() and not any(Path(draft).glob("tokenizer*")):
        return None
    ours, theirs = ({token: repr(text) for text, token in each.get_vocab().items()} for each in (tokenizer, load_tokenizer(draft)))
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise ModelMismatch(f"tokenizer: token {token}", ours.get(token, "none"), theirs.get(token, "none"))
    num_ids: int = max(ours) + 1
    return num_ids


def _max_context(config: CompileConfig, *models: Any) -> int:
    limit = min(getattr(model, "max_position_embeddings", None) or DEFAULT_MAX_CONTEXT + config.path_depth for model in models)
    most = (limit - config.path_depth) // PAGE_LEN * PAGE_LEN  # a tree's nodes stand up to so many positions past the text
    if config.max_context is not None and config.max_context > most:
        raise ConfigError("max_context", config.max_context, f"at most {most}: the models know {limit} positions, of which a tree needs {config.path_depth}")
    return config.max_context or min(DEFAULT_MAX_CONTEXT, most)


def _model_files(model: str) -> list[Path]:
    folder = Path(model)
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")) if folder.is_dir() else []


def _origin(model: str, files: Sequence[SourceFile]) -> list[str]:
    """What tells a model from every other: the bytes of a folder, the commit of a hub id."""
    from transformers.utils.hub import cached_file

    if files:
        return [file.digest for file in files]
    config_path = cached_file(model, "config.json")  # <cache>/models--<id>/snapshots/<commit>/config.json
    assert config_path is not None, "it was read a moment ago"
    return [model, Path(config_path).parent.name]


def _eos_tokens(target: str, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(target).eos_token_id
    except OSError:
        eos = None
    eos = tokenizer.eos_token_id if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def _build_models(bundle: Bundle, progress: Progress) -> None:
    config, vocab = bundle.config, shared_vocab(*(load_config(model) for model in bundle.models))
    kinds: list[tuple[str, str, Menu, KVShape, int, int]] = [
        ("target", bundle.models[0], target_menu(config), bundle.kv_target, 0, config.ranks),
        ("draft", bundle.models[1], draft_menu(config), bundle.kv_draft, config.num_candidates, 1),
    ]
    with progress.phase("pack weights", config.ranks + 1):
        for rank in range(config.ranks):
            _pack(bundle, bundle.target_weights(rank), bundle.models[0], rank, config.ranks)
            progress.advance()
        _pack(bundle, bundle.folder / "draft", bundle.models[1], 0, 1)
        progress.advance()
        artifacts.save_bytes(bundle.folder / "tokenizer.json", load_tokenizer(bundle.models[0]).backend_tokenizer.to_str(pretty=True).encode())
    jobs = [
        GraphJob(
            model=model,
            num_candidates=num_candidates,
            vocab=vocab,
            dtype=config.dtype,
            device=config.device,
            kv=kv,
            max_depth=config.path_depth,
            num_tokens=size,
            path=str(graph_path(bundle.folder / kind, size)),
            exact=config.exact,
            ranks=ranks,
        )
        for kind, model, menu, kv, num_candidates, ranks in kinds
        for size in menu.sizes
    ]
    missing = [job for job in jobs if not Path(job.path).exists()]
    with progress.phase("compile graphs", len(missing)):
        compile_graphs(missing, num_workers=_num_workers(bundle), on_done=lambda job: progress.advance())


def _num_workers(bundle: Bundle) -> int:
    """One for every core; on CUDA no more than the device has memory for: each holds the weights of both models, of one shard."""
    cores = os.cpu_count() or 1
    if bundle.config.device == "cpu":
        return cores
    weight_bytes = sum((folder / FILE_NAME).stat().st_size for folder in (bundle.target_weights(0), bundle.folder / "draft"))
    return max(1, min(cores, torch.cuda.mem_get_info()[0] // (weight_bytes + WORKER_BYTES)))


def _pack(bundle: Bundle, folder: Path, model: str, rank: int, ranks: int) -> None:
    if not has_weights(folder):
        loaded = load_model(model, dtype=getattr(torch, bundle.config.dtype))
        if ranks > 1:
            shard_(loaded, rank, ranks)
        if bundle.config.device == "cpu":
            pack_linears_(loaded)
        with artifacts.atomic_directory(folder / "packing") as temporary:
            save_weights(loaded, temporary)
        (folder / "packing" / FILE_NAME).rename(folder / FILE_NAME)
        (folder / "packing").rmdir()


def _check_exactness(target: CompiledModel[KVCache], progress: Progress) -> tuple[int, ...]:
    with progress.phase("check exactness", 1):
        return inexact_widths(target, target.menu.sizes)


def read_texts(path: Path) -> list[str]:
    """The texts of a calibration file.

    Raises:
        ConfigError: missing, unreadable or without text.
    """
    try:
        lines = path.read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines if line.strip()] if path.suffix == ".jsonl" else "\n".join(lines).split("\n\n")
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("calibration", str(path), 'a text file, or a .jsonl with a "text" in every line', str(error)) from None
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError("calibration", str(path), "a file with at least one text")
    return texts


def _prompts(bundle: Bundle, texts: Sequence[str]) -> list[list[int]]:
    """The beginnings of the first texts."""
    tokenizer = Tokenizer(bundle.folder / "tokenizer.json", bundle.command)
    prompts = [tokenizer.encode(text)[:PROMPT_LEN] for text in texts[: bundle.config.calibration_texts]]
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    if not prompts:
        path = bundle.calibration or str(CALIBRATION_TEXT)
        raise ConfigError("calibration", path, "a file with at least one text of two tokens", "ygg compile TARGET DRAFT --calibration FILE")
    return prompts


def _collect(bundle: Bundle, engine: Engine, prompts: Sequence[Sequence[int]], progress: Progress) -> list[Traces]:
    """Traces at every calibration temperature."""
    config = bundle.config
    num_tokens = max(1, min(config.calibration_tokens, bundle.max_context - PROMPT_LEN - config.max_depth))
    writing = Shape(_reference_width(config), min(6, config.max_depth), min(16, config.verify_widths[-1]))
    with progress.phase("collect traces", len(prompts) * len(CALIBRATION_TEMPERATURES)):
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
        return AcceptanceTable({trace.temperature: fit_acceptance(trace.sampled) for trace in traces})


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
    with progress.phase("measure latencies", 2 * ROUNDS * len(contexts) + 1):
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
    """Search the execution plan of an iteration; it lies with the profile, for it is this machine's."""
    policy = _typical(bundle, acceptance, latency)
    policy = replace(policy, shape=replace(policy.shape, verify=_typical_verify(policy)))  # every run must do the same work
    work = Workload(target=engine.target, draft=engine.draft, prompt=prompt, policy=policy, max_context=bundle.max_context)
    with progress.phase("search the plan", NUM_TICKS):
        choice = choose_plan(work, tick=progress.advance)
    return {"shape": str(policy.shape), **choice.to_json()}


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
    held_out_by_temperature = {str(each.trace.temperature): evaluate(each, latency, config.verify_widths, cost_ms) for each in judged}
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


def bundled_arguments() -> tuple[str, str, str]:
    """Target, draft and name of the pair that ships with the package."""
    target, draft = bundled_models()
    return str(target), str(draft), BUNDLED
