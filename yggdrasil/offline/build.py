"""Write the files of a build: packed weights, tokenizer, graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.buckets import draft_menu, target_menu
from yggdrasil.compiler.model import graph_path
from yggdrasil.compiler.weights import FILE_NAME, save_weights
from yggdrasil.compiler.workers import GraphJob, compile_graphs
from yggdrasil.config import CompileConfig
from yggdrasil.models.load import load_model, pack_linears_
from yggdrasil.models.proof import check_forward, expected_passages
from yggdrasil.models.sharding import shard_
from yggdrasil.models.support import kv_shape
from yggdrasil.offline.progress import Progress
from yggdrasil.store import artifacts, storage
from yggdrasil.store.digests import Ledger
from yggdrasil.tokenizer import load_tokenizer

__all__ = ["build_files"]

# A processor does not wait for weights in its caches: a draft of 1.8 MB was a tenth slower when compressed.
CACHED_BYTES = 8 << 20
WORKER_BYTES = 3 * 2**29  # a CUDA context, its libraries, two pages of KV


def build_files(bundle: Bundle, num_workers: int | None, progress: Progress) -> dict[str, str]:
    """Write all files of a bundle that are missing or damaged.

    Args:
        num_workers: Most processes that compile graphs; None for one per core.

    Returns:
        Digest of every file, by its path in the folder.
    """
    ledger = Ledger(bundle.folder)
    whole = ledger.whole(bundle.files)
    _write_weights(bundle, ledger, whole, progress)
    tokenizer = load_tokenizer(bundle.models[0]).backend_tokenizer
    artifacts.save_bytes(bundle.tokenizer_path, tokenizer.to_str(pretty=True).encode())
    ledger.record(str(bundle.tokenizer_path.relative_to(bundle.folder)))
    _write_graphs(bundle, ledger, whole, num_workers, progress)
    return ledger.digests(bundle.files)


def _write_weights(bundle: Bundle, ledger: Ledger, whole: set[str], progress: Progress) -> None:
    target, draft = bundle.models
    ranks = bundle.config.ranks
    # the draft first: if it is refused, no large file has been written
    parts = [(draft, bundle.folder / "draft", 0, 1)]
    parts += [(target, bundle.target_weights(rank), rank, ranks) for rank in range(ranks)]
    for model, folder, rank, num_shards in parts:
        name = str((folder / FILE_NAME).relative_to(bundle.folder))
        if name not in whole:
            _pack(bundle, model, folder, rank, num_shards, progress)
            ledger.record(name)


def _pack(bundle: Bundle, model: str, folder: Path, rank: int, ranks: int, progress: Progress) -> None:
    """Check a model's forward, then write its packed weights, or one rank's shard of them."""
    config = bundle.config
    num_positions = bundle.max_context + config.path_depth
    with progress.phase(f"load {folder.name}", 2):
        loaded = load_model(model, dtype=bundle.dtype)
        progress.advance()
        passages = expected_passages(model, loaded, bundle.vocab, num_positions) if rank == 0 else []
        kv = kv_shape(loaded.config, 0)
        if ranks > 1:  # a shard alone computes nothing, so the whole model is checked
            check_forward(model, loaded, kv, passages, num_positions)
            shard_(loaded, rank, ranks)
    if config.device == "cpu":
        num_linears = sum(type(module) is torch.nn.Linear for module in loaded.modules())
        with progress.phase(f"pack {folder.name}", num_linears):
            pack_linears_(loaded, compress=_compresses(config, loaded), tick=progress.advance)
    if ranks == 1:
        with progress.phase(f"prove {folder.name}", 1):
            check_forward(model, loaded, kv, passages, num_positions)
    with (
        progress.phase(f"store {folder.name}", 1),
        storage.temporary_folder(folder, FILE_NAME) as temporary,
    ):
        save_weights(loaded, temporary)
        storage.put(temporary / FILE_NAME, folder / FILE_NAME)


def _compresses(config: CompileConfig, model: torch.nn.Module) -> bool:
    if config.compress is not None:
        return config.compress
    num_bytes = sum(module.weight.nbytes for module in model.modules() if type(module) is torch.nn.Linear)
    return config.can_compress and "amx_bf16" in artifacts.cpu_flags().split() and num_bytes > CACHED_BYTES


def _write_graphs(
    bundle: Bundle, ledger: Ledger, whole: set[str], num_workers: int | None, progress: Progress
) -> None:
    names = {job: str(Path(job.path).relative_to(bundle.folder)) for job in _graph_jobs(bundle)}
    missing = [job for job, name in names.items() if name not in whole]

    def on_done(job: GraphJob) -> None:
        ledger.record(names[job])
        progress.advance()

    with progress.phase("compile graphs", len(missing)):
        compile_graphs(missing, num_workers=_num_workers(bundle, num_workers), on_done=on_done)


def _graph_jobs(bundle: Bundle) -> list[GraphJob]:
    config = bundle.config
    shared: dict[str, Any] = {
        "vocab": bundle.vocab,
        "dtype": config.dtype,
        "device": config.device,
        "max_depth": config.path_depth,
        "exact": config.exact,
    }
    target: dict[str, Any] = {
        "model": bundle.models[0],
        "weights": str(bundle.target_weights(0)),
        "num_candidates": 0,
        "kv": bundle.kv_target,
        "ranks": config.ranks,
    }
    draft: dict[str, Any] = {
        "model": bundle.models[1],
        "weights": str(bundle.folder / "draft"),
        "num_candidates": config.num_candidates,
        "kv": bundle.kv_draft,
        "ranks": 1,
    }
    return [
        GraphJob(**shared, **fields, num_tokens=size, path=str(graph_path(bundle.folder / kind, size)))
        for kind, fields, menu in (
            ("target", target, target_menu(config)),
            ("draft", draft, draft_menu(config)),
        )
        for size in menu.sizes
    ]


def _num_workers(bundle: Bundle, most: int | None) -> int:
    """Processes that compile graphs: one per core, at most `most`, on CUDA also limited by free memory.

    On CUDA each process holds the draft and one shard of the target.
    """
    cores = most or os.cpu_count() or 1
    if bundle.config.device == "cpu":
        return cores
    folders = (bundle.target_weights(0), bundle.folder / "draft")
    weight_bytes = sum((folder / FILE_NAME).stat().st_size for folder in folders)
    free_bytes, _ = torch.cuda.mem_get_info()
    return max(1, min(cores, free_bytes // (weight_bytes + WORKER_BYTES)))
