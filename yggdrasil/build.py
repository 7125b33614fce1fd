"""The offline half: what `ygg compile` does, phase by phase, each resumable."""

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
from yggdrasil.bundle import BUNDLED, Bundle, SourceFile, bundled_models, machine_fields
from yggdrasil.compiler.buckets import Menu, draft_menu, target_menu
from yggdrasil.compiler.model import CompiledModel, graph_path
from yggdrasil.compiler.pool import GraphJob, compile_graphs
from yggdrasil.compiler.weights import FILE_NAME, save_weights
from yggdrasil.config import CompileConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError, ModelMismatch
from yggdrasil.kernels import load_kernels
from yggdrasil.kv import KVShape
from yggdrasil.layout import PAGE_LEN
from yggdrasil.measure import ROUNDS, calibrate, curve_json, host_milliseconds, latency_curve
from yggdrasil.models.load import check_vocabularies, kv_shape, load_config, load_model, pack_linears_
from yggdrasil.policy.acceptance import AcceptanceTable
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import FixedShape, best_shape
from yggdrasil.state import Shape
from yggdrasil.tokenizer import Tokenizer, load_tokenizer

__all__ = ["CALIBRATION_TEXT", "Progress", "bundled_arguments", "compile_pair", "read_texts", "resolved"]

CALIBRATION_TEXT = Path(__file__).parent / "data" / "calibration.jsonl"
CALIBRATION_TEMPERATURES = (0.0, 1.0)
PROMPT_LEN = 24  # tokens of a calibration text that serve as the prompt
DEFAULT_MAX_CONTEXT = 2048


class Progress(Protocol):
    """Where a compilation reports: one phase at a time, in steps."""

    def phase(self, name: str, total: int) -> AbstractContextManager[Any]:
        """A block during which `advance` counts up to `total`."""
        ...

    def advance(self) -> None: ...


def compile_pair(target: str, draft: str, *, name: str, config: CompileConfig, calibration: Path = CALIBRATION_TEXT, progress: Progress) -> Bundle:
    """Lower, measure and calibrate a pair; finished parts of an earlier, interrupted run are kept.

    Args:
        target: Folder or hub id of the target.
        draft: Folder or hub id of the draft.
        name: Of the pair.
        config: Menu, dtype, device, limits.
        calibration: Text of the domain: a `.jsonl` with a "text" in every line, or plain text.
        progress: Told about every phase.

    Returns:
        The bundle, saved and current.

    Raises:
        ConfigError, ModelMismatch, UnsupportedModel: before anything is written.
        RuntimeError: a graph could not be built.
    """
    with progress.phase("check the pair", 1):
        bundle = _describe(target, draft, name, config, calibration)
        texts = read_texts(calibration)
    with progress.phase("compile operators", 1):
        load_kernels()
    _build_models(bundle, progress)
    models = bundle.load_models()
    engine = Engine(*models, max_context=bundle.max_context, eos_tokens=bundle.eos_tokens)
    prompts = _prompts(bundle, texts)
    acceptance = _calibrate(bundle, engine, prompts, progress)
    _profile(bundle, models, engine, prompts[0], acceptance, progress)
    bundle.save()
    return bundle


def _describe(target: str, draft: str, name: str, config: CompileConfig, calibration: Path) -> Bundle:
    """Check everything that can be wrong with the input, and settle what is to be built."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "cpu on this machine: torch sees no CUDA device")
    target, draft = resolved(target), resolved(draft)
    target_config, draft_config = load_config(target), load_config(draft)
    check_vocabularies(target_config, draft_config)
    tokenizer = load_tokenizer(target)
    _check_tokenizers(tokenizer, draft)
    config = replace(config, max_context=_max_context(config, target_config, draft_config))
    assert config.max_context is not None
    sources = tuple(SourceFile.of(path) for model in (target, draft) for path in _model_files(model))
    machine = machine_fields()
    fingerprint = artifacts.digest([source.digest for source in sources], [target, draft] if not sources else [], asdict(config), machine)
    capacity = (config.max_context + config.max_nodes + PAGE_LEN - 1) // PAGE_LEN * PAGE_LEN
    return Bundle(
        name=name,
        folder=artifacts.compile_cache() / name / fingerprint,
        config=config,
        dataset=calibration.stem,
        calibration="" if calibration == CALIBRATION_TEXT else str(calibration.resolve()),
        kv_target=kv_shape(target_config, capacity),
        kv_draft=kv_shape(draft_config, capacity),
        eos_tokens=_eos_tokens(target, tokenizer),
        sources=sources,
        models=(target, draft),
        machine=machine,
    )


def resolved(model: str) -> str:
    """A local folder's absolute path; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _check_tokenizers(tokenizer: Any, draft: str) -> None:
    if Path(draft).is_dir() and not any(Path(draft).glob("tokenizer*")):
        return  # a draft without a tokenizer of its own is trained on the target's: the vocabulary sizes agree
    if load_tokenizer(draft).get_vocab() != tokenizer.get_vocab():
        raise ModelMismatch("tokenizer", "one vocabulary", "another of the same size")


def _max_context(config: CompileConfig, *models: Any) -> int:
    limit = min(getattr(model, "max_position_embeddings", None) or DEFAULT_MAX_CONTEXT + config.path_depth for model in models)
    most = (limit - config.path_depth) // PAGE_LEN * PAGE_LEN  # a tree's nodes stand up to so many positions past the text
    if config.max_context is not None and config.max_context > most:
        raise ConfigError("max_context", config.max_context, f"at most {most}: the models know {limit} positions, of which a tree needs {config.path_depth}")
    return config.max_context or min(DEFAULT_MAX_CONTEXT, most)


def _model_files(model: str) -> list[Path]:
    folder = Path(model)
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")) if folder.is_dir() else []


def _eos_tokens(target: str, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(target).eos_token_id
    except OSError:
        eos = None
    eos = tokenizer.eos_token_id if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def _build_models(bundle: Bundle, progress: Progress) -> None:
    kinds: list[tuple[str, str, Menu, KVShape, int]] = [
        ("target", bundle.models[0], target_menu(bundle.config), bundle.kv_target, 0),
        ("draft", bundle.models[1], draft_menu(bundle.config), bundle.kv_draft, bundle.config.num_candidates),
    ]
    with progress.phase("pack weights", len(kinds)):
        for kind, model, _, _, _ in kinds:
            _pack(bundle, kind, model)
            progress.advance()
    jobs = [
        GraphJob(
            model, num_candidates, bundle.config.dtype, bundle.config.device, kv, bundle.config.path_depth, size, str(graph_path(bundle.folder / kind, size))
        )
        for kind, model, menu, kv, num_candidates in kinds
        for size in menu.sizes
    ]
    missing = [job for job in jobs if not Path(job.path).exists()]
    with progress.phase("compile graphs", len(missing)):
        compile_graphs(missing, num_workers=os.cpu_count() or 1, on_done=lambda job: progress.advance())


def _pack(bundle: Bundle, kind: str, model: str) -> None:
    folder = bundle.folder / kind
    if not (folder / FILE_NAME).exists():
        loaded = load_model(model, dtype=getattr(torch, bundle.config.dtype))
        if bundle.config.device == "cpu":
            pack_linears_(loaded)
        with artifacts.atomic_directory(folder / "packing") as temporary:
            save_weights(loaded, temporary)
        (folder / "packing" / FILE_NAME).rename(folder / FILE_NAME)
        (folder / "packing").rmdir()
    if kind == "target":
        load_tokenizer(model).backend_tokenizer.save(str(bundle.folder / "tokenizer.json"))


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
    tokenizer = Tokenizer(bundle.folder / "tokenizer.json", bundle.command)
    prompts = [tokenizer.encode(text)[:PROMPT_LEN] for text in texts]
    return [prompt for prompt in prompts if prompt][: bundle.config.calibration_prompts]


def _calibrate(bundle: Bundle, engine: Engine, prompts: Sequence[Sequence[int]], progress: Progress) -> AcceptanceTable:
    config = bundle.config
    num_tokens = max(1, min(config.calibration_tokens, bundle.max_context - PROMPT_LEN - config.max_depth))
    with progress.phase("calibrate acceptance", len(prompts) * len(CALIBRATION_TEMPERATURES)):
        table = {
            temperature: calibrate(
                engine, prompts, temperature=temperature, num_tokens=num_tokens, widths=config.widths, max_depth=config.max_depth, tick=progress.advance
            )
            for temperature in CALIBRATION_TEMPERATURES
        }
    payload = {str(temperature): acceptance.to_json() for temperature, acceptance in table.items()}
    artifacts.save_json(bundle.acceptance_path, {"fingerprint": bundle.folder.name, "by_temperature": payload})
    return AcceptanceTable(table)


def _profile(
    bundle: Bundle, models: tuple[CompiledModel, CompiledModel], engine: Engine, prompt: Sequence[int], acceptance: AcceptanceTable, progress: Progress
) -> None:
    contexts = sorted({min(64, bundle.max_context // 2), 512, bundle.max_context - bundle.config.prefill_chunk} & set(range(1, bundle.max_context)))
    with progress.phase("measure latencies", 2 * ROUNDS * len(contexts)):
        draft = latency_curve(models[1], contexts, progress.advance)
        verify = latency_curve(models[0], contexts, progress.advance)
    latency = LatencyModel(draft, verify, 0.0, 0.0, 0.0)
    shape, _ = best_shape(acceptance.nearest(0.0), latency, widths=bundle.config.widths, verify_widths=bundle.config.verify_widths, context_len=64)
    shape = shape if shape.depth else Shape(bundle.config.widths[-1], min(4, bundle.config.max_depth))
    host = host_milliseconds(engine, prompt, FixedShape(shape, acceptance.nearest(0.0), latency, bundle.config.verify_widths))
    payload = {"fingerprint": bundle.folder.name, "machine": bundle.machine, "draft": curve_json(draft), "verify": curve_json(verify), **host}
    artifacts.save_json(bundle.profile_path, payload)


def bundled_arguments() -> tuple[str, str, str]:
    """Target, draft and name of the pair that ships with the package."""
    target, draft = bundled_models()
    return str(target), str(draft), BUNDLED
