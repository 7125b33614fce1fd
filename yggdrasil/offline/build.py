"""Write the files of a build: packed weights, tokenizer, graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.buckets import draft_menu, target_menu
from yggdrasil.compiler.model import graph_path
from yggdrasil.compiler.weights import FILE_NAME, Lender, save_weights
from yggdrasil.compiler.workers import GraphJob, compile_graphs
from yggdrasil.config import CompileConfig
from yggdrasil.models.layers import keep_layers_, layer_list, name_before
from yggdrasil.models.load import load_model, pack_linears_
from yggdrasil.models.proof import check_forward, check_rounded, expected_passages
from yggdrasil.models.sharding import shard_
from yggdrasil.models.support import kv_shape
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.offline.progress import Progress
from yggdrasil.offline.quality import MOST_SECONDS, losses, quality, token_texts
from yggdrasil.offline.reuse import copy_graph, recipes, record_recipes, stored_graphs
from yggdrasil.store import artifacts, storage
from yggdrasil.store.digests import Ledger

__all__ = ["build_files", "compresses", "read_quality"]

# A processor does not wait for weights in its caches: a draft of 1.8 MB was a tenth slower when compressed.
CACHED_BYTES = 8 << 20
WORKER_BYTES = 3 * 2**29  # a CUDA context, its libraries, two pages of KV


def build_files(
    bundle: Bundle, texts: Sequence[str], num_workers: int | None, progress: Progress
) -> dict[str, str]:
    """Write all files of a bundle that are missing or damaged.

    Args:
        texts: On which rounded weights are compared with the weights as they were.
        num_workers: Most processes that compile graphs; None for one per core.

    Returns:
        Digest of every file, by its path in the folder.
    """
    ledger = Ledger(bundle.folder)
    whole = ledger.whole(bundle.files)
    _write_weights(bundle, texts, ledger, whole, progress)
    tokenizer = load_tokenizer(bundle.models[0]).backend_tokenizer
    artifacts.save_bytes(bundle.tokenizer_path, tokenizer.to_str(pretty=True).encode())
    ledger.record(str(bundle.tokenizer_path.relative_to(bundle.folder)))
    _write_graphs(bundle, ledger, whole, num_workers, progress)
    return ledger.digests(bundle.files)


class Part(NamedTuple):
    """A model, or one rank's shard of it, whose weights are stored.

    Args:
        model: Folder or hub id.
        folder: Where its weights go.
        weights: Format of its linear layers.
        quality_path: Where what rounding changes goes; None without rounding, and for a draft.
        layers: Numbers of the layers that are kept; None for all.
        lender: Folder with the stored weights of the same model, which need not be stored twice.
    """

    model: str
    folder: Path
    weights: str
    quality_path: Path | None = None
    rank: int = 0
    ranks: int = 1
    layers: tuple[int, ...] | None = None
    lender: Path | None = None

    @property
    def is_rounded(self) -> bool:
        return self.weights != "bf16"


def _write_weights(
    bundle: Bundle, texts: Sequence[str], ledger: Ledger, whole: set[str], progress: Progress
) -> None:
    config = bundle.config
    quality_path = None if config.weights == "bf16" else bundle.quality_path
    targets = [
        Part(
            bundle.models[0], bundle.target_weights(rank), config.weights, quality_path, rank, config.ranks
        )
        for rank in range(config.ranks)
    ]
    draft = Part(bundle.models[-1], bundle.folder / "draft", config.draft_weights)
    # the draft first: if it is refused, no large file has been written
    parts = [draft, *targets]
    if bundle.own_draft is not None:  # it shares tensors with the target where both are mapped files
        lender = bundle.target_weights(0) if config.can_round else None
        parts = [*targets, draft._replace(layers=bundle.draft_layers, lender=lender)]
    for part in parts:
        paths = [path for path in (part.folder / FILE_NAME, part.quality_path) if path is not None]
        names = [str(path.relative_to(bundle.folder)) for path in paths]
        if not whole.issuperset(names):
            _pack(bundle, part, texts, progress)
            for name in names:
                ledger.record(name)


def _pack(bundle: Bundle, part: Part, texts: Sequence[str], progress: Progress) -> None:
    """Check a model's forward, then write its packed weights, or one rank's shard of them."""
    config = bundle.config
    name = part.folder.name
    num_positions = bundle.max_context + config.path_depth
    with progress.phase(f"load {name}", 2):
        loaded = load_model(part.model, dtype=bundle.dtype)
        lender = _lender(part, loaded)
        if part.layers is not None:
            keep_layers_(loaded, part.layers)
        progress.advance()
        passages = (
            expected_passages(part.model, loaded, bundle.vocab, num_positions) if part.rank == 0 else []
        )
        proof = (part.model, loaded, kv_shape(loaded.config, 0), passages, num_positions)
        if part.ranks > 1 or part.is_rounded:  # afterwards the layers compute something else
            check_forward(*proof)
        if part.ranks > 1:
            shard_(loaded, part.rank, part.ranks)
    if part.is_rounded:
        _round(bundle, part, loaded, texts, progress)
        with progress.phase(f"prove {name}", 1):
            check_rounded(part.model, loaded)
    elif config.device == "cpu":
        with progress.phase(f"pack {name}", _num_linears(loaded)):
            pack_linears_(loaded, compress=compresses(config, loaded), tick=progress.advance)
    if part.ranks == 1 and not part.is_rounded:
        with progress.phase(f"prove {name}", 1):
            check_forward(*proof)
    with progress.phase(f"store {name}", 1), storage.temporary_folder(part.folder, FILE_NAME) as temporary:
        save_weights(loaded, temporary, lender)
        storage.put(temporary / FILE_NAME, part.folder / FILE_NAME)


def _lender(part: Part, loaded: Any) -> Lender | None:
    """The stored weights that a part shares, before its model loses layers."""
    if part.lender is None:
        return None
    name = layer_list(loaded)
    before = str if part.layers is None or name is None else name_before(name, part.layers)
    return Lender(part.lender, before)


def _round(bundle: Bundle, part: Part, loaded: Any, texts: Sequence[str], progress: Progress) -> None:
    """Round the weights of a loaded model, and measure what that changes if the part asks for it."""
    name = part.folder.name
    read = [] if part.quality_path is None else token_texts(part.model, texts, loaded.config.vocab_size)
    with progress.phase(f"read text with {name} as it is", 1):
        before = losses(loaded, read, MOST_SECONDS)
    with progress.phase(f"round {name}", _num_linears(loaded)):
        pack_linears_(loaded, weights=part.weights, tick=progress.advance)
    if part.quality_path is not None:
        with progress.phase(f"read text with rounded {name}", 1):
            after = losses(loaded, read[: len(before)])
        artifacts.save_json(part.quality_path, quality(before, after, read))


def _num_linears(model: torch.nn.Module) -> int:
    return sum(type(module) is torch.nn.Linear for module in model.modules())


def read_quality(bundle: Bundle) -> dict[str, float]:
    """`Bundle.quality` of written files."""
    if bundle.config.weights == "bf16":
        return {}
    return artifacts.load_json(bundle.quality_path, bundle.command)


def compresses(config: CompileConfig, model: torch.nn.Module) -> bool:
    """Whether weights of a loaded model that are kept are compressed."""
    if config.compress is not None:
        return config.compress
    num_bytes = sum(module.weight.nbytes for module in model.modules() if type(module) is torch.nn.Linear)
    return config.can_compress and "amx_bf16" in artifacts.cpu_flags().split() and num_bytes > CACHED_BYTES


def _write_graphs(
    bundle: Bundle, ledger: Ledger, whole: set[str], num_workers: int | None, progress: Progress
) -> None:
    names = {job: str(Path(job.path).relative_to(bundle.folder)) for job in _graph_jobs(bundle)}
    missing = [job for job, name in names.items() if name not in whole]
    missing = _copy_stored(bundle, missing, names, ledger, progress)

    def on_done(job: GraphJob) -> None:
        ledger.record(names[job])
        progress.advance()

    with progress.phase("compile graphs", len(missing)):
        compile_graphs(missing, num_workers=_num_workers(bundle, num_workers), on_done=on_done)


def _copy_stored(
    bundle: Bundle,
    missing: Sequence[GraphJob],
    names: Mapping[GraphJob, str],
    ledger: Ledger,
    progress: Progress,
) -> list[GraphJob]:
    """Copy what other builds have of the missing graphs; return the rest."""
    stored = stored_graphs()
    recipe_of = recipes(names)
    record_recipes(bundle.folder, {name: recipe_of[job] for job, name in names.items()})
    copied = [
        job
        for job in missing
        if (graph := stored.get(recipe_of[job])) is not None and copy_graph(graph, Path(job.path))
    ]
    ledger.record(*(names[job] for job in copied))
    if copied:
        pairs = sorted({stored[recipe_of[job]].folder.parent.name for job in copied})
        progress.note(f"{len(copied)} graphs are copied: {', '.join(pairs)} has models of this structure")
    return [job for job in missing if job not in copied]


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
        "model": bundle.models[-1],
        "weights": str(bundle.folder / "draft"),
        "layers": bundle.draft_layers,
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
