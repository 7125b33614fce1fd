"""Graphs of earlier builds that a new build needs too.

A graph depends on the structure of a model, not on the values of its weights. So a fine-tuned model takes
the graphs of its base model, and a target with another draft keeps its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from yggdrasil.bundle import machine_fields
from yggdrasil.compiler.weights import load_weights
from yggdrasil.compiler.workers import GraphJob
from yggdrasil.errors import ArtifactError
from yggdrasil.models.load import load_config
from yggdrasil.store import artifacts
from yggdrasil.store.digests import Ledger
from yggdrasil.store.trust import check_trusted

__all__ = ["Stored", "copy_graph", "recipes", "record_recipes", "stored_graphs"]

RECIPES_NAME = "graphs.json"  # in the folder of a build
# entries of a configuration that change no graph
COSMETIC = ("_name_or_path", "transformers_version")


class Stored(NamedTuple):
    """A graph of an earlier build.

    Args:
        folder: Folder of the build.
        name: Path of the graph in it.
    """

    folder: Path
    name: str


def recipes(jobs: Iterable[GraphJob]) -> dict[GraphJob, str]:
    """A digest for each graph of what decides its code; equal digests mean equal code.

    These are the fields of the job, the model's configuration, name, dtype, shape and sharing of all stored
    tensors, and the versions of everything that compiles.

    Args:
        jobs: Graphs of models whose weights are stored.
    """
    import transformers

    versions = {**machine_fields(), "transformers": transformers.__version__}
    structure = cache(_structure)
    return {
        job: artifacts.digest(
            asdict(replace(job, model="", weights="", path="")), structure(job.model, job.weights), versions
        )
        for job in jobs
    }


def _structure(model: str, weights: str) -> list[Any]:
    settings = json.loads(load_config(model).to_json_string(use_diff=False))
    first_by_place: dict[tuple[int, tuple[int, ...]], str] = {}
    tensors = []
    for name, tensor in sorted(load_weights(Path(weights), "cpu", command="").items()):
        first = first_by_place.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        tensors.append((name, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), first))
    return [{key: value for key, value in settings.items() if key not in COSMETIC}, tensors]


def record_recipes(folder: Path, by_name: Mapping[str, str]) -> None:
    """Write the recipes of a build's graphs, by their paths in its folder."""
    artifacts.save_json(folder / RECIPES_NAME, {"graphs": dict(by_name)})


def stored_graphs() -> dict[str, Stored]:
    """Graphs of all builds in the store, by recipe; builds that cannot be read are left out."""
    return {recipe: graph for folder in _builds() for recipe, graph in _graphs_of(folder)}


def _builds() -> Iterator[Path]:
    return (path.parent for path in artifacts.compile_cache().glob(f"*/*/{RECIPES_NAME}"))


def _graphs_of(folder: Path) -> list[tuple[str, Stored]]:
    with suppress(ArtifactError, AttributeError, KeyError):
        by_name = artifacts.load_json(folder / RECIPES_NAME, "")["graphs"]
        return [
            (recipe, Stored(folder, name))
            for name, recipe in by_name.items()
            if os.path.isfile(folder / name)
        ]
    return []


def copy_graph(graph: Stored, path: Path) -> bool:
    """Copy a graph to its path in another build; returns whether it could be used.

    A graph that is missing, damaged, unreadable, or that other users can write is not.
    """
    source = graph.folder / graph.name
    try:
        check_trusted([source], "")
        if not Ledger(graph.folder).whole([graph.name]):
            return False
        content = source.read_bytes()
    except (ArtifactError, OSError):
        return False
    artifacts.save_bytes(path, content)
    return True
