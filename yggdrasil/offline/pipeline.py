"""Compile a pair, phase by phase: what `ygg compile` does.

After an interruption the next run keeps finished weights and graphs; measurements start again. They are
written together with the bundle at the very end, so an earlier build of the pair stays usable until then.
Last, builds that nothing can load any more are removed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yggdrasil.bundle import MALFORMED, Bundle
from yggdrasil.config import CompileConfig
from yggdrasil.errors import ArtifactError
from yggdrasil.kernels import build_kernels, load_kernels
from yggdrasil.kernels.compilations import compilations
from yggdrasil.loading import load_bundle, load_models
from yggdrasil.offline.build import build_files, read_quality
from yggdrasil.offline.download import download
from yggdrasil.offline.exactness import NUM_PLAIN, inexact_widths
from yggdrasil.offline.forecast import forecast
from yggdrasil.offline.inputs import describe_pair, model_files, resolved
from yggdrasil.offline.own_draft import with_own_draft
from yggdrasil.offline.progress import Progress
from yggdrasil.offline.traces import CALIBRATION_TEXT, read_texts
from yggdrasil.offline.tuning import tune
from yggdrasil.pair import load_measurements
from yggdrasil.store import artifacts, storage
from yggdrasil.store.trust import check_trusted

__all__ = ["compile_pair"]

HARDWARE = ("cpu_flags", "compute_capability")  # fields of `machine_fields`


def compile_pair(
    target: str,
    draft: str | None = None,
    *,
    name: str,
    config: CompileConfig,
    calibration: Path = CALIBRATION_TEXT,
    num_workers: int | None = None,
    progress: Progress,
) -> Bundle:
    """Build, measure and calibrate a pair.

    Args:
        target: Folder or hub id of the target.
        draft: Folder or hub id of the draft; with None it is made from the target.
        config: Menu, dtype, device, limits.
        calibration: Text to calibrate on: a `.jsonl` file with a "text" in every line, or a text file.
        num_workers: Most processes that compile graphs; None for one per core.
        progress: Gets every phase.

    Returns:
        The bundle, saved and current. If another process compiles a pair of this name, this call waits for
        it, and returns its bundle if that is the same pair.

    Raises:
        ConfigError, BrokenCheckpoint, ModelMismatch, UnsupportedModel: before anything is written if the
            configuration or a weight file's header shows it, else before the model's weights are written.
        StoreError: the disk has too little room, or a file cannot be written; the earlier build stays.
        RuntimeError: a graph could not be compiled.
    """
    target = resolved(target)
    draft = None if draft is None else resolved(draft)
    num_files = sum(len(model_files(model)) for model in (target, draft) if model is not None)
    with progress.phase("check the pair", max(1, num_files)):
        texts = read_texts(calibration)  # before the files of the models are read, which takes longer
        bundle = describe_pair(target, draft, name, config, calibration, progress.advance)
    for model in bundle.models:
        download(model, progress)
    lock = bundle.folder.parent / artifacts.LOCK_NAME
    wait = progress.phase("wait for another run", 1)
    with storage.store_errors(artifacts.root()), artifacts.one_at_a_time(lock, wait) as waited:
        storage.sweep(_folders(name))
        _check_compiler_cache(bundle.command)
        if draft is None:
            expected = forecast(bundle, num_workers, has_draft=False)
            expected.check_room()
            for line in expected.warnings():
                progress.note(line)
            _build_operators(bundle, progress)
            bundle = with_own_draft(bundle, texts, progress)
        if waited and (done := _compiled_meanwhile(bundle)):
            return done
        return _compile(bundle, texts, num_workers, progress)


def _folders(name: str) -> list[Path]:
    """All folders that a compilation of this pair writes to."""
    stores = artifacts.pair_folders(name)
    below = [folder for store in stores for folder in store.rglob("*") if folder.is_dir()]
    return [*stores, *below, artifacts.compile_cache() / artifacts.OPERATORS]


def _compiled_meanwhile(bundle: Bundle) -> Bundle | None:
    """The pair as another process has compiled it, if every option is the same."""
    try:
        done = load_bundle(bundle.name)
        load_measurements(done, done.dataset)
    except ArtifactError:
        return None  # it was interrupted, or compiled something else
    return done if replace(done, inexact_widths=(), digests={}, quality={}) == bundle else None


def _build_operators(bundle: Bundle, progress: Progress) -> None:
    with progress.phase("compile operators", 1):
        build_kernels()
        load_kernels(bundle.command)


def _compile(bundle: Bundle, texts: Sequence[str], num_workers: int | None, progress: Progress) -> Bundle:
    began = time.perf_counter()
    compiled = compilations()
    expected = forecast(bundle, num_workers)
    expected.check_room()
    for line in expected.lines():
        progress.note(line)
    if bundle.own_draft is None:
        _build_operators(bundle, progress)
    digests = build_files(bundle, texts, num_workers, progress)
    bundle = replace(bundle, digests=digests, quality=read_quality(bundle))
    for rank in range(bundle.config.ranks):
        bundle.check_files(rank)
    target, draft = load_models(bundle)
    sizes = target.menu.sizes
    with progress.phase("check exactness", NUM_PLAIN + len(sizes)):
        bundle = replace(bundle, inexact_widths=inexact_widths(target, sizes, progress.advance))
    tune(bundle, (target, draft), texts, progress)
    expected.learn(time.perf_counter() - began, compilations() - compiled)
    _remove_outdated(bundle, progress)
    return bundle


def _check_compiler_cache(command: str) -> None:
    """Raise ArtifactError if other users can write the folder from which Inductor takes compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    check_trusted([Path(cache_dir())], f"TORCHINDUCTOR_CACHE_DIR=FOLDER {command}")


def _remove_outdated(bundle: Bundle, progress: Progress) -> None:
    """Remove this pair's builds for this hardware by another torch or another version of the package."""
    builds = bundle.folder.parent.glob("*/bundle.json")
    outdated = [path.parent for path in builds if _is_outdated(path, bundle.machine)]
    if outdated:
        with progress.phase("remove outdated builds", len(outdated)):
            for folder in outdated:
                shutil.rmtree(folder, ignore_errors=True)
                progress.advance()


def _is_outdated(path: Path, machine: Mapping[str, Any]) -> bool:
    """Whether nothing can load a build; one for another processor stays, the folder may be shared."""
    try:
        built_for = json.loads(path.read_bytes())["machine"]  # older versions wrote no digest to check
        return built_for != machine and all(built_for[field] == machine[field] for field in HARDWARE)
    except (OSError, *MALFORMED):
        return False
