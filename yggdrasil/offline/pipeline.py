"""The offline half: what `ygg compile` does, phase by phase.

Packed weights and graphs are kept when it is interrupted: the next run continues after them. Measurements
are taken from the start, and written together with the bundle at the very end, so that until then a pair
that was compiled before stays as it is. Then builds that nothing can load any more go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from yggdrasil.bundle import BUNDLED, MALFORMED, Bundle, bundled_models, load_bundle, machine_fields
from yggdrasil.compiler.buckets import Menu, draft_menu, target_menu
from yggdrasil.compiler.model import CompiledModel, graph_path
from yggdrasil.compiler.weights import FILE_NAME, save_weights
from yggdrasil.compiler.workers import GraphJob, compile_graphs
from yggdrasil.config import CompileConfig
from yggdrasil.errors import ArtifactError, BrokenCheckpoint, ConfigError, ModelMismatch, UnsupportedModel
from yggdrasil.kernels import build_kernels, load_kernels
from yggdrasil.kv import KVCache, KVShape
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.checkpoint import check_weights
from yggdrasil.models.defaults import end_tokens, unapplied_defaults
from yggdrasil.models.load import check_vocabularies, load_config, load_model, pack_linears_, shared_vocab
from yggdrasil.models.proof import check_forward, expected_passages
from yggdrasil.models.sharding import check_divisible, shard_
from yggdrasil.models.support import context_limits, kv_shape
from yggdrasil.offline.exactness import NUM_PLAIN, inexact_widths
from yggdrasil.offline.progress import Progress
from yggdrasil.offline.traces import BUNDLED_TEXT, CALIBRATION_TEXT, read_texts
from yggdrasil.offline.tuning import tune
from yggdrasil.pair import load_measurements
from yggdrasil.store import artifacts, storage
from yggdrasil.store.digests import KnownFile, Ledger, read_files
from yggdrasil.store.trust import check_trusted
from yggdrasil.tokenizer import load_tokenizer

__all__ = ["bundled_arguments", "compile_pair", "planned_context", "resolved"]

DEFAULT_MAX_CONTEXT = 2048
LEAST_CONTEXT = 32  # that `CompileConfig` takes
HARDWARE = ("cpu_flags", "compute_capability")  # of `machine_fields`
# weights that stay in a processor's caches are not waited for: a draft of 1.8 MB took a tenth longer
# compressed
CACHED_BYTES = 8 << 20
WORKER_BYTES = 3 * 2**29  # a CUDA context, its libraries, two pages of KV


def compile_pair(
    target: str,
    draft: str,
    *,
    name: str,
    config: CompileConfig,
    calibration: Path = CALIBRATION_TEXT,
    num_workers: int | None = None,
    progress: Progress,
) -> Bundle:
    """Lower, measure and calibrate a pair; weights and graphs of an earlier, interrupted run are kept. An
    earlier pair of this name stays until the end.

    Args:
        target: Folder or hub id of the target.
        draft: Folder or hub id of the draft.
        name: Of the pair.
        config: Menu, dtype, device, limits.
        calibration: Text of the domain: a `.jsonl` with a "text" in every line, or plain text.
        num_workers: Most processes that build graphs; None for one on every core.
        progress: Told about every phase.

    Returns:
        The bundle, saved and current. Where another process is compiling a pair of this name it is waited
        for, and if it was this very pair, that is it.

    Raises:
        ConfigError, BrokenCheckpoint, ModelMismatch, UnsupportedModel: before anything is written, as far
            as configurations and the headers of weight files tell; what shows only in a model as it runs,
            before its weights are written and a graph is built.
        StoreError: what is built cannot be written; what was there before stays.
        RuntimeError: a graph could not be built.
    """
    num_files = sum(len(_model_files(resolved(model))) for model in (target, draft))
    with progress.phase("check the pair", max(1, num_files)):
        texts = read_texts(calibration)  # before all files of the models are read
        bundle = _describe(target, draft, name, config, calibration, progress.advance)
    lock = bundle.folder.parent / artifacts.LOCK_NAME
    wait = progress.phase("wait for another run", 1)
    with storage.store_errors(artifacts.root()), artifacts.one_at_a_time(lock, wait) as waited:
        storage.sweep(_folders(name))
        return (_compiled_meanwhile(bundle) if waited else None) or _compile(
            bundle, texts, num_workers, progress
        )


def _folders(name: str) -> list[Path]:
    """Every folder that a compilation of this pair writes to."""
    stores = artifacts.pair_folders(name)
    below = [folder for store in stores for folder in store.rglob("*") if folder.is_dir()]
    return [*stores, *below, artifacts.compile_cache() / artifacts.OPERATORS]


def _compiled_meanwhile(bundle: Bundle) -> Bundle | None:
    """The pair as another process finished it, if it is the same to the last option."""
    try:
        done = load_bundle(bundle.name)
        load_measurements(done, done.dataset)
    except ArtifactError:
        return None  # it broke off, or compiled something else
    return done if replace(done, inexact_widths=(), digests={}) == bundle else None


def _compile(bundle: Bundle, texts: Sequence[str], num_workers: int | None, progress: Progress) -> Bundle:
    _check_compiler_cache(bundle.command)
    with progress.phase("compile operators", 1):
        build_kernels()
        load_kernels(bundle.command)
    bundle = replace(bundle, digests=_build_models(bundle, num_workers, progress))
    for rank in range(bundle.config.ranks):
        bundle.check_files(rank)
    models = bundle.load_models()
    bundle = replace(bundle, inexact_widths=_check_exactness(models[0], progress))
    tune(bundle, models, texts, progress)
    _remove_outdated(bundle, progress)
    return bundle


def _check_compiler_cache(command: str) -> None:
    """Inductor takes compiled code from a folder whose name others can guess: raises ArtifactError where
    they own or write it.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    check_trusted([Path(cache_dir())], f"TORCHINDUCTOR_CACHE_DIR=FOLDER {command}")


def _remove_outdated(bundle: Bundle, progress: Progress) -> None:
    """Take away builds of this pair for this hardware by other code or another torch: nothing will load
    them, and each holds all weights.
    """
    outdated = [
        path.parent
        for path in bundle.folder.parent.glob("*/bundle.json")
        if _is_outdated(path, bundle.machine)
    ]
    if outdated:
        with progress.phase("remove outdated builds", len(outdated)):
            for folder in outdated:
                shutil.rmtree(folder, ignore_errors=True)
                progress.advance()


def _is_outdated(path: Path, machine: Mapping[str, Any]) -> bool:
    """A folder of artifacts may be shared: what another processor runs stays."""
    try:
        built_for = json.loads(path.read_bytes())["machine"]  # of any version, those before digests too
        return built_for != machine and all(built_for[field] == machine[field] for field in HARDWARE)
    except (OSError, *MALFORMED):
        return False


def _describe(
    target: str,
    draft: str,
    name: str,
    config: CompileConfig,
    calibration: Path,
    tick: Callable[[], None] = lambda: None,
) -> Bundle:
    """Check everything that can be wrong with the input, and settle what is to be built; ticks after every
    file of the models.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device",
            "cuda",
            "cpu on this machine: torch sees no CUDA device",
            "ygg compile TARGET DRAFT --device cpu",
        )
    target = resolved(target)
    draft = resolved(draft)
    target_config = load_config(target)
    draft_config = load_config(draft)
    check_divisible(target_config, config.ranks)
    tokenizer = load_tokenizer(target)
    check_vocabularies(target_config, draft_config, _common_ids(tokenizer, draft))
    notes = (
        *_absent_tokens(target, tokenizer, target_config.vocab_size),
        *filter(None, [unapplied_defaults(target)]),
    )
    eos_tokens = end_tokens(target, target_config, tokenizer)
    config = replace(config, max_context=_max_context(config, {target: target_config, draft: draft_config}))
    for model, its_config in ((target, target_config), (draft, draft_config)):
        if Path(model).is_dir():
            check_weights(Path(model), its_config)
    assert config.max_context is not None
    capacity = (config.max_context + config.max_nodes + PAGE_LEN - 1) // PAGE_LEN * PAGE_LEN
    kv_target = _of_a_rank(kv_shape(target_config, capacity), config.ranks)
    kv_draft = kv_shape(draft_config, capacity)
    sources = _sources((target, draft), name, tick)
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
        vocab=shared_vocab(target_config, draft_config),
        eos_tokens=eos_tokens,
        sources=tuple(file for files in sources for file in files),
        models=(target, draft),
        machine=machine,
        notes=notes,
    )


def _of_a_rank(whole: KVShape, ranks: int) -> KVShape:
    return replace(whole, num_kv_heads=whole.num_kv_heads // ranks)


def resolved(model: str) -> str:
    """A local folder's absolute path; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _common_ids(tokenizer: Any, draft: str) -> int | None:
    """One more than the largest id of the tokenizer that both models have; None for a draft without one of
    its own, which is trained on the target's.
    """
    if Path(draft).is_dir() and not any(Path(draft).glob("tokenizer*")):
        return None
    ours, theirs = (
        {token: repr(text) for text, token in each.get_vocab().items()}
        for each in (tokenizer, load_tokenizer(draft))
    )
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            raise ModelMismatch(
                f"tokenizer: token {token}", ours.get(token, "none"), theirs.get(token, "none")
            )
    num_ids: int = max(ours) + 1
    return num_ids


def _absent_tokens(target: str, tokenizer: Any, vocab: int) -> list[str]:
    """A note on special tokens that the tokenizer has and the target has not, as after a fine-tuning that
    added one for padding: no text stands for them.

    Raises:
        BrokenCheckpoint: it lacks tokens that text is made of.
    """
    absent = {token: text for text, token in tokenizer.get_vocab().items() if token >= vocab}
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    if words := sorted(absent.keys() - special):
        lacking = (
            f"{len(words)} tokens of its tokenizer have no embedding, the first is {absent[words[0]]!r} "
            f"({words[0]}); the model has {vocab}"
        )
        raise BrokenCheckpoint(
            target,
            lacking,
            "call resize_token_embeddings and train them, or take the tokenizer that the model was "
            "trained with",
        )
    if not absent:
        return []
    named = ", ".join(f"{absent[token]!r} ({token})" for token in sorted(absent))
    return [
        f"the target has no embedding for special tokens of its tokenizer: {named}; a prompt that "
        "contains one is refused"
    ]


def _max_context(config: CompileConfig, models: Mapping[str, Any]) -> int:
    limit = min(
        getattr(model, "max_position_embeddings", None) or DEFAULT_MAX_CONTEXT + config.path_depth
        for model in models.values()
    )
    most = _longest(limit, config)
    if config.max_context is not None and config.max_context > most:
        raise ConfigError(
            "max_context",
            config.max_context,
            f"at most {most}: the models know {limit} positions, of which a tree needs {config.path_depth}",
        )
    settled = config.max_context or min(DEFAULT_MAX_CONTEXT, most)
    limits = [
        (each.num_positions, name, each.reason)
        for name, model in models.items()
        for each in context_limits(model)
    ]
    num_positions, name, reason = min(limits, default=(settled + config.path_depth, "", ""))
    longest = _longest(num_positions, config)
    if longest < LEAST_CONTEXT:
        raise UnsupportedModel(name, reason)
    if settled > longest:
        why = f"{name} has {reason}, of which a tree needs {config.path_depth}"
        raise ConfigError(
            "max_context", settled, f"at most {longest}: {why}", f"add --max-context {longest}"
        )
    return settled


def _longest(num_positions: int, config: CompileConfig) -> int:
    """The longest context, in whole pages, that leaves room for a tree within `num_positions`."""
    return (num_positions - config.path_depth) // PAGE_LEN * PAGE_LEN


def planned_context(target: str, draft: str) -> int:
    """Most tokens of prompt and output together that a pair compiled with the defaults would hold."""
    return _max_context(
        CompileConfig(), {model: load_config(model) for model in (resolved(target), resolved(draft))}
    )


def _sources(models: Sequence[str], name: str, tick: Callable[[], None]) -> list[list[KnownFile]]:
    """The files of each model; what an earlier build of this pair was made from is not read again."""
    paths = [_model_files(model) for model in models]
    try:
        files = read_files(
            [path.resolve() for folder in paths for path in folder], known=_known_sources(name), tick=tick
        )
    except OSError as error:
        raise artifacts.unreadable(
            Path(error.filename or models[0]), error, "ygg compile TARGET DRAFT"
        ) from None
    first = len(paths[0])
    return [files[:first], files[first:]]


def _known_sources(name: str) -> list[KnownFile]:
    known = []
    for path in (artifacts.compile_cache() / name).glob("*/bundle.json"):
        with suppress(ArtifactError, *MALFORMED):
            known += [KnownFile(**source) for source in artifacts.load_json(path, "")["sources"]]
    return known


def _model_files(model: str) -> list[Path]:
    folder = Path(model)
    entries = folder.iterdir() if folder.is_dir() else []
    return sorted(
        path for path in entries if path.suffix in (".json", ".safetensors", ".bin") and path.is_file()
    )


def _origin(model: str, files: Sequence[KnownFile]) -> list[str]:
    """What tells a model from every other: the bytes of a folder, the commit of a hub id."""
    from transformers.utils.hub import cached_file

    if files:
        return [file.digest for file in files]
    config_path = cached_file(model, "config.json")  # <cache>/models--<id>/snapshots/<commit>/config.json
    assert config_path is not None, "it was read a moment ago"
    return [model, Path(config_path).parent.name]


def _build_models(bundle: Bundle, num_workers: int | None, progress: Progress) -> dict[str, str]:
    """Pack and compile what is not there with every byte that was written; returns digests of all files."""
    config = bundle.config
    draft_folder = bundle.folder / "draft"
    kinds: list[tuple[str, str, Path, Menu, KVShape, int, int]] = [
        (
            "target",
            bundle.models[0],
            bundle.target_weights(0),
            target_menu(config),
            bundle.kv_target,
            0,
            config.ranks,
        ),
        (
            "draft",
            bundle.models[1],
            draft_folder,
            draft_menu(config),
            bundle.kv_draft,
            config.num_candidates,
            1,
        ),
    ]
    ledger = Ledger(bundle.folder)
    whole = ledger.whole(bundle.files)
    shards = [(bundle.target_weights(rank), 0, rank, config.ranks) for rank in range(config.ranks)]
    # the small one first: where it is refused, no large file was written for nothing
    for folder, which, rank, ranks in [(draft_folder, 1, 0, 1), *shards]:
        weights_name = str((folder / FILE_NAME).relative_to(bundle.folder))
        if weights_name not in whole:
            _pack(bundle, folder, which, rank, ranks, progress)
            ledger.record(weights_name)
    artifacts.save_bytes(
        bundle.tokenizer_path,
        load_tokenizer(bundle.models[0]).backend_tokenizer.to_str(pretty=True).encode(),
    )
    ledger.record(str(bundle.tokenizer_path.relative_to(bundle.folder)))
    jobs = [
        GraphJob(
            model=model,
            weights=str(weights),
            num_candidates=num_candidates,
            vocab=bundle.vocab,
            dtype=config.dtype,
            device=config.device,
            kv=kv,
            max_depth=config.path_depth,
            num_tokens=size,
            path=str(graph_path(bundle.folder / kind, size)),
            exact=config.exact,
            ranks=ranks,
        )
        for kind, model, weights, menu, kv, num_candidates, ranks in kinds
        for size in menu.sizes
    ]
    names = {job.path: str(Path(job.path).relative_to(bundle.folder)) for job in jobs}
    missing = [job for job in jobs if names[job.path] not in whole]

    def note(job: GraphJob) -> None:
        ledger.record(names[job.path])
        progress.advance()

    with progress.phase("compile graphs", len(missing)):
        compile_graphs(missing, num_workers=_num_workers(bundle, num_workers), on_done=note)
    return ledger.digests(bundle.files)


def _num_workers(bundle: Bundle, most: int | None) -> int:
    """One for every core, at most as many as allowed; on CUDA no more than the device has memory for.

    Each holds the weights of both models, of one shard.
    """
    cores = most or os.cpu_count() or 1
    if bundle.config.device == "cpu":
        return cores
    weight_bytes = sum(
        (folder / FILE_NAME).stat().st_size
        for folder in (bundle.target_weights(0), bundle.folder / "draft")
    )
    return max(1, min(cores, torch.cuda.mem_get_info()[0] // (weight_bytes + WORKER_BYTES)))


def _pack(bundle: Bundle, folder: Path, which: int, rank: int, ranks: int, progress: Progress) -> None:
    """Write the packed weights of the target (0) or the draft (1), once its forward is proved right."""
    name = bundle.models[which]
    config = bundle.config
    num_positions = bundle.max_context + config.path_depth
    with progress.phase(f"load {folder.name}", 2):
        loaded = load_model(name, dtype=bundle.dtype)
        progress.advance()
        passages = expected_passages(name, loaded, bundle.vocab, num_positions) if rank == 0 else []
        whole = kv_shape(loaded.config, 0)
        if ranks > 1:  # before it is shared out: a shard alone computes nothing
            check_forward(name, loaded, whole, passages, num_positions)
            shard_(loaded, rank, ranks)
    if config.device == "cpu":
        with progress.phase(
            f"pack {folder.name}", sum(type(module) is torch.nn.Linear for module in loaded.modules())
        ):
            pack_linears_(loaded, compress=_compresses(config, loaded), tick=progress.advance)
    if ranks == 1:
        with progress.phase(f"prove {folder.name}", 1):
            check_forward(name, loaded, whole, passages, num_positions)
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


def _check_exactness(target: CompiledModel[KVCache], progress: Progress) -> tuple[int, ...]:
    with progress.phase("check exactness", NUM_PLAIN + len(target.menu.sizes)):
        return inexact_widths(target, target.menu.sizes, progress.advance)


def bundled_arguments() -> tuple[str, str, str]:
    """Target, draft and name of the pair that ships with the package."""
    target, draft = bundled_models()
    return str(target), str(draft), BUNDLED
