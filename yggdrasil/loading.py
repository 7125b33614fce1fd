"""Load the models of a compiled pair.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from yggdrasil.bundle import Bundle, check_current, compile_command, read_bundle, torchrun_command
from yggdrasil.compiler.buckets import draft_menu, target_menu
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.compiler.weights import load_weights
from yggdrasil.config import AUTO
from yggdrasil.errors import ArtifactError
from yggdrasil.kernels import load_cuda_kernels, load_kernels
from yggdrasil.kv import KVCache, KVShape, KVStorage
from yggdrasil.ranks.launch import num_ranks

__all__ = [
    "load_bundle",
    "load_draft",
    "load_draft_weights",
    "load_models",
    "load_target",
    "paged_storage",
    "target_arguments",
]

S = TypeVar("S", bound=KVStorage)


def load_bundle(name: str) -> Bundle:
    """The current bundle of a pair, checked: it can be used here and its files are whole.

    Raises:
        ArtifactError: the pair is unknown, corrupt or stale, or was compiled for another number of ranks.

    Cost: reads files that have changed since they were last read.
    """
    bundle = read_bundle(name)
    check_current(bundle)
    _check_ranks(bundle)
    bundle.check_files(rank=0)
    return bundle


def _check_ranks(bundle: Bundle) -> None:
    ranks = bundle.config.ranks
    here = num_ranks()
    if ranks == here:
        return
    processes = "1 process" if ranks == 1 else f"{ranks} ranks"
    how = "decode without torchrun"
    if ranks > 1:
        how = f"decode with `{shlex.join(torchrun_command(ranks))} generate ...`"
    problem = f"compiled for {processes}, this run has {here}; {how}, or compile it for {here}"
    config = replace(bundle.config, ranks=here, **({} if here == 1 else _divided(bundle)))
    command = compile_command(bundle.name, bundle.models, config, bundle.calibration)
    raise ArtifactError(bundle.folder, problem, command)


def _divided(bundle: Bundle) -> dict[str, Any]:
    """Options without which several processes cannot share a target."""
    draft_weights = "bf16" if len(bundle.models) > 1 else AUTO
    return {"weights": "bf16", "draft_weights": draft_weights, "draft_layers": None, "compress": None}


def load_models(bundle: Bundle) -> tuple[CompiledModel[KVCache], CompiledModel[KVCache]]:
    """Target and draft for one request at a time, with every graph and one copy of the weights."""
    device = bundle.config.device
    if bundle.config.ranks > 1:
        target = _load_leading_target(bundle)
    else:
        target = load_target(bundle, KVCache(bundle.kv_target, dtype=bundle.dtype, device=device))
    draft_cache = KVCache(bundle.kv_draft, dtype=bundle.dtype, device=device)
    return target, load_draft(bundle, draft_cache, load_draft_weights(bundle, device))


def _load_leading_target(bundle: Bundle) -> CompiledModel[KVCache]:
    """Shard of rank 0; the other ranks load theirs and follow it."""
    from yggdrasil.ranks.lead import LeadingCache, LeadingModel, leader  # imports torch.distributed

    device = bundle.config.device
    leader().load(bundle, device)
    cache = LeadingCache(leader(), bundle.kv_target, dtype=bundle.dtype, device=device)
    return LeadingModel(leader(), **target_arguments(bundle, rank=0), cache=cache)


def load_target(bundle: Bundle, cache: S) -> CompiledModel[S]:
    """The target's graphs over a cache for one row, or over paged storage for many."""
    assert bundle.config.ranks == 1, "a batch has no leader"
    return CompiledModel(**target_arguments(bundle, rank=0), cache=cache)


def load_draft(bundle: Bundle, cache: S, weights: dict[str, Tensor]) -> CompiledModel[S]:
    """The draft's graphs over a cache or paged storage, with the given weights on the pair's device."""
    _load_operators(bundle)
    return CompiledModel(
        **_shared_arguments(bundle),
        folder=bundle.folder / "draft",
        menu=draft_menu(bundle.config),
        weights=weights,
        num_candidates=bundle.config.num_candidates,
        cache=cache,
    )


def load_draft_weights(bundle: Bundle, device: str) -> dict[str, Tensor]:
    """The draft's weights by name; on the CPU the file is mapped, not read."""
    return load_weights(bundle.folder / "draft", device, bundle.command)


def target_arguments(bundle: Bundle, rank: int) -> dict[str, Any]:
    """Arguments of `CompiledModel` for the target, or for one rank's shard of it; all but the cache."""
    weights = load_weights(bundle.target_weights(rank), bundle.config.device, bundle.command)
    _load_operators(bundle)
    return {
        **_shared_arguments(bundle),
        "folder": bundle.folder / "target",
        "menu": target_menu(bundle.config),
        "weights": weights,
        "num_candidates": 0,
    }


def _shared_arguments(bundle: Bundle) -> dict[str, Any]:
    return {
        "device": bundle.config.device,
        "max_depth": bundle.config.path_depth,
        "vocab": bundle.vocab,
        "command": bundle.command,
    }


def _load_operators(bundle: Bundle) -> None:
    load_kernels(bundle.command)
    if bundle.config.device == "cuda":
        load_cuda_kernels()


def paged_storage(bundle: Bundle, kv: KVShape, pages_BP: Tensor, num_pages: int) -> KVStorage:
    """KV storage of one model for many rows.

    Args:
        kv: Shape of the target's or the draft's cache.
        pages_BP: (B, P) int32 page ids, as many per row as `kv` has; see serve/pages.py.
        num_pages: Number of pages in the storage.
    """
    return KVStorage(
        kv, num_pages=num_pages, pages_BP=pages_BP, dtype=bundle.dtype, device=bundle.config.device
    )
