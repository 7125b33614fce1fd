"""The pairs in the store: can they be used, and are their files whole?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from yggdrasil.bundle import Bundle, check_current, first_command, is_compiled, read_bundle
from yggdrasil.errors import ArtifactError
from yggdrasil.kernels import check_kernels, library_path
from yggdrasil.pair import load_decisions, load_measurements
from yggdrasil.store import artifacts, storage
from yggdrasil.store.digests import Ledger

__all__ = ["StoredPair", "stored_pairs", "verified_files"]


@dataclass(frozen=True)
class StoredPair:
    """A pair in the store.

    Args:
        num_bytes: Bytes of all its builds and measurements.
        models: Target and draft; empty if the bundle cannot be read.
        weights: Formats of their weights; empty as well.
        problem: Why the pair cannot be used on this machine, and what to run; None if it can be used.
    """

    name: str
    num_bytes: int
    models: tuple[str, ...]
    weights: tuple[str, ...]
    problem: str | None


def stored_pairs() -> Iterator[StoredPair]:
    """Every pair in the store, by name. Cost: reads model files that changed since they were compiled."""
    for name in artifacts.pair_names():
        num_bytes = sum(storage.size_bytes(folder) for folder in artifacts.pair_folders(name))
        models: tuple[str, ...] = ()
        weights: tuple[str, ...] = ()
        try:
            if not is_compiled(name):
                raise ArtifactError(name, "not compiled to the end", first_command(name))
            bundle = read_bundle(name)
            models = bundle.named_models
            weights = (bundle.config.weights, bundle.config.draft_weights)
            check_current(bundle)
        except ArtifactError as error:
            yield StoredPair(name, num_bytes, models, weights, error.problem)
        else:
            yield StoredPair(name, num_bytes, models, weights, None)


def verified_files(name: str) -> Iterator[Path]:
    """Read every file of a pair in full; yields those that are whole.

    Raises:
        ArtifactError: a file is damaged, or the pair is not compiled for this machine.
    """
    bundle = read_bundle(name)
    check_current(bundle)
    yield from (bundle.folder.parent / "current.json", bundle.folder / "bundle.json")
    for rank in range(bundle.config.ranks):
        bundle.check_files(rank)
    Ledger(bundle.folder).check(bundle.digests, bundle.command, full=True)
    yield from (bundle.folder / file for file in bundle.files)
    check_kernels(bundle.command, full=True)
    yield library_path()
    yield from (bundle.profile_path, bundle.plan_path)
    for dataset in _calibrations(bundle):
        load_measurements(bundle, dataset)
        load_decisions(bundle, dataset)
        yield from (
            bundle.predictor_folder(dataset) / file
            for file in ("acceptance.json", "predictor.json", "predictor.safetensors")
        )


def _calibrations(bundle: Bundle) -> list[str]:
    """Calibration texts of this build, the default one first."""
    others = [dataset for dataset in bundle.datasets if dataset != bundle.dataset]
    paths = {dataset: bundle.predictor_folder(dataset) / "acceptance.json" for dataset in others}
    current = [
        dataset
        for dataset, path in paths.items()
        if artifacts.load_json(path, bundle.command).get("fingerprint") == bundle.folder.name
    ]
    return [bundle.dataset, *current]
