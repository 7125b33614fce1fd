"""Check the inputs of a compilation and decide what will be built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from yggdrasil.bundle import MALFORMED, Bundle, machine_fields
from yggdrasil.config import AUTO, WEIGHTS, CompileConfig
from yggdrasil.errors import ArtifactError, BrokenCheckpoint, ConfigError, ModelMismatch, UnsupportedModel
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.checkpoint import check_weights
from yggdrasil.models.defaults import end_tokens, request_defaults, unapplied_defaults
from yggdrasil.models.gguf import check_tokenizer
from yggdrasil.models.load import check_vocabularies, load_config, shared_vocab, stored_format
from yggdrasil.models.sharding import check_divisible
from yggdrasil.models.support import context_limits, kv_shape
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.offline.traces import BUNDLED_TEXT, CALIBRATION_TEXT, check_lengths, read_texts
from yggdrasil.store import artifacts
from yggdrasil.store.digests import KnownFile, read_files
from yggdrasil.store.sources import is_gguf

__all__ = [
    "common_ids",
    "describe_pair",
    "max_context",
    "model_files",
    "planned_context",
    "resolved",
    "source_files",
]

DEFAULT_MAX_CONTEXT = 2048
MIN_CONTEXT = 32  # the smallest that `CompileConfig` accepts


def describe_pair(
    target: str,
    draft: str | None,
    name: str,
    config: CompileConfig,
    calibration: Path,
    tick: Callable[[], None] = lambda: None,
) -> Bundle:
    """Check the inputs and describe the bundle to build; writes nothing.

    Args:
        target: Absolute folder or hub id of the target.
        draft: Absolute folder or hub id of the draft. With None it will be made from the target, and the
            description is not complete: see `own_draft.with_own_draft`.
        tick: Called once for every file in `model_files` of each model.

    Raises:
        ConfigError, BrokenCheckpoint, ModelMismatch, UnsupportedModel: an input that cannot work.
    """
    _check_device(config)
    models = (target,) if draft is None else (target, draft)
    configs = {model: load_config(model) for model in models}
    target_config = configs[target]
    draft_config = configs[models[-1]]
    check_divisible(target_config, config.ranks)
    tokenizer = load_tokenizer(target)
    if is_gguf(target):
        check_tokenizer(target, tokenizer)
    texts = read_texts(calibration)[: config.calibration_texts]
    check_lengths((tokenizer.backend_tokenizer.encode(text).ids for text in texts), str(calibration))
    if draft is None:
        _check_own_draft(config, target_config.num_hidden_layers)
    else:
        _check_given_draft(config)
        ids = common_ids(tokenizer, draft, target_config.vocab_size)
        check_vocabularies(target_config, draft_config, ids)
    notes = [
        _stored_note("the target", target, config.dtype),
        "" if draft is None else _stored_note("the draft", draft, config.dtype),
        _absent_tokens(target, tokenizer, target_config.vocab_size),
        unapplied_defaults(target),
    ]
    eos_tokens = end_tokens(target, target_config, tokenizer)
    context_len = max_context(config, configs)
    config = replace(config, max_context=context_len)
    for model, model_config in configs.items():
        if Path(model).is_dir():
            check_weights(Path(model), model_config)
    capacity = -(-(context_len + config.max_nodes) // PAGE_LEN) * PAGE_LEN
    kv_target = kv_shape(target_config, capacity)
    kv_target = replace(kv_target, num_kv_heads=kv_target.num_kv_heads // config.ranks)
    kv_draft = kv_shape(draft_config, capacity)
    sources = source_files(models, name, tick)
    origins = [_origin(model, files) for model, files in zip(models, sources, strict=True)]
    machine = machine_fields()
    open_choice = {"draft_weights": AUTO, "draft_layers": None} if draft is None else {}
    lowering = config.lowering | open_choice
    fingerprint = artifacts.digest(*origins, asdict(kv_target), asdict(kv_draft), lowering, machine)
    vocab = shared_vocab(target_config, draft_config)
    is_bundled_text = calibration == CALIBRATION_TEXT
    return Bundle(
        name=name,
        folder=artifacts.compile_cache() / name / fingerprint,
        config=config,
        dataset=BUNDLED_TEXT if is_bundled_text else calibration.stem,
        calibration="" if is_bundled_text else str(calibration.resolve()),
        kv_target=kv_target,
        kv_draft=kv_draft,
        vocab=vocab,
        eos_tokens=eos_tokens,
        sources=tuple(file for files in sources for file in files),
        models=models,
        machine=machine,
        notes=tuple(note for note in notes if note),
        defaults=request_defaults(target, vocab),
    )


def _stored_note(which: str, model: str, dtype: str) -> str:
    """A note on the quantised weights of a checkpoint; empty if it has none."""
    found = stored_format(model)
    return f"{which}'s checkpoint has quantised weights ({found}), read as {dtype}" if found else ""


def resolved(model: str) -> str:
    """Absolute path of a local folder or GGUF file; a hub id stays as it is.

    Raises:
        ConfigError: it is empty, or no path can be that long.
    """
    if not model:  # the path of the working folder
        raise ConfigError("model", model, "a folder, a GGUF file, or the id of a model on the hub")
    try:
        is_here = Path(model).is_dir() or is_gguf(model)
    except OSError as error:
        raise ConfigError(
            "model", model, f"a folder, or the id of a model on the hub ({error.strerror})"
        ) from None
    return str(Path(model).resolve()) if is_here else model


def _check_own_draft(config: CompileConfig, num_layers: int) -> None:
    """Raise ConfigError if no draft made from the target can be quicker than it."""
    layers = config.draft_layers
    weights = config.draft_weights
    if layers is not None and layers > num_layers:
        raise ConfigError("draft_layers", layers, f"at most {num_layers}, the layers of the target")
    if weights != AUTO and WEIGHTS.index(weights) < WEIGHTS.index(config.weights):
        raise ConfigError("draft_weights", weights, f"no larger than the target's, {config.weights}")
    formats = WEIGHTS[WEIGHTS.index(config.weights) :] if config.can_round else ("bf16",)
    smaller = formats[1:] if weights == AUTO else tuple({weights} - {config.weights})
    if smaller or (num_layers > 1 and layers != num_layers):
        return
    if num_layers == 1:
        allowed = "given: neither fewer layers nor smaller weights make a draft of this target"
        raise ConfigError("draft", None, allowed, "ygg compile TARGET DRAFT")
    others = ", or --draft-weights smaller than the target's" if formats[1:] else ""
    raise ConfigError("draft_layers", layers, f"from 1 to {num_layers - 1}{others}")


def _check_given_draft(config: CompileConfig) -> None:
    """Raise ConfigError for options of a draft that is made from the target."""
    if config.draft_layers is not None:
        allowed = "left out where a draft is given"
        raise ConfigError(
            "draft_layers", config.draft_layers, allowed, "ygg compile TARGET --draft-layers N"
        )
    if config.draft_weights == AUTO:
        raise ConfigError("draft_weights", AUTO, f"one of {', '.join(WEIGHTS)} where a draft is given")


def _check_device(config: CompileConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        allowed = "cpu on this machine: torch finds no CUDA device"
        raise ConfigError("device", "cuda", allowed, "ygg compile TARGET DRAFT --device cpu")


def common_ids(tokenizer: Any, draft: str, vocab: int) -> int | None:
    """Number of token ids that both tokenizers share: the largest id plus one.

    Args:
        draft: Folder, hub id or GGUF file; a folder without a tokenizer was trained on the target's and
            gives None.
        vocab: V of the target. Ids above it stand for nothing that it reads or writes: transformers adds
            one to the tokenizers of some GGUF files.

    Raises:
        ModelMismatch: names the first token that differs.
    """
    if Path(draft).is_dir() and not any(Path(draft).glob("tokenizer*")):
        return None
    ours, theirs = (
        {token: repr(text) for text, token in each.get_vocab().items() if token < vocab}
        for each in (tokenizer, load_tokenizer(draft))
    )
    for token in sorted(ours.keys() | theirs.keys()):
        in_target = ours.get(token, "none")
        in_draft = theirs.get(token, "none")
        if in_target != in_draft:
            raise ModelMismatch(f"tokenizer: token {token}", in_target, in_draft)
    num_ids: int = max(ours) + 1
    return num_ids


def _absent_tokens(target: str, tokenizer: Any, vocab: int) -> str:
    """A note on special tokens without an embedding in the target, such as added padding; empty if none.

    Raises:
        BrokenCheckpoint: tokens of ordinary text have no embedding.
    """
    absent = {token: text for text, token in tokenizer.get_vocab().items() if token >= vocab}
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    if words := sorted(absent.keys() - special):
        raise BrokenCheckpoint(
            target,
            f"{len(words)} tokens of its tokenizer have no embedding, the first is {absent[words[0]]!r} "
            f"({words[0]}); the model has {vocab}",
            "call resize_token_embeddings and train them, or use the tokenizer of the training",
        )
    if not absent:
        return ""
    tokens = ", ".join(f"{absent[token]!r} ({token})" for token in sorted(absent))
    return (
        f"the target has no embedding for special tokens of its tokenizer: {tokens}; "
        "a prompt that contains one is refused"
    )


def max_context(config: CompileConfig, models: Mapping[str, Any]) -> int:
    """Longest context of a pair: the one asked for, or the models' limit, at most DEFAULT_MAX_CONTEXT.

    Args:
        models: Configurations of target and draft, by name.

    Raises:
        ConfigError: more was asked for than the models support.
        UnsupportedModel: a model supports less than MIN_CONTEXT.
    """
    unlimited = DEFAULT_MAX_CONTEXT + config.path_depth
    num_positions, name = min(
        (getattr(model, "max_position_embeddings", None) or unlimited, name)
        for name, model in models.items()
    )
    most = _longest_context(num_positions, config)
    if most < MIN_CONTEXT:
        needed = MIN_CONTEXT + config.path_depth
        raise UnsupportedModel(
            name, f"a context of {num_positions} positions, of which a tree needs {needed},"
        )
    if config.max_context is not None and config.max_context > most:
        why = f"the models have {num_positions} positions, a tree needs {config.path_depth}"
        raise ConfigError("max_context", config.max_context, f"at most {most}: {why}")
    context_len = config.max_context or min(DEFAULT_MAX_CONTEXT, most)
    limits = [
        (limit.num_positions, name, limit.reason)
        for name, model in models.items()
        for limit in context_limits(model)
    ]
    num_positions, name, reason = min(limits, default=(context_len + config.path_depth, "", ""))
    longest = _longest_context(num_positions, config)
    if longest < MIN_CONTEXT:
        raise UnsupportedModel(name, reason)
    if context_len > longest:
        allowed = f"at most {longest}: {name} has {reason}, a tree needs {config.path_depth}"
        raise ConfigError("max_context", context_len, allowed, f"add --max-context {longest}")
    return context_len


def _longest_context(num_positions: int, config: CompileConfig) -> int:
    """Longest context, in whole pages, that leaves room for a tree within `num_positions`."""
    return (num_positions - config.path_depth) // PAGE_LEN * PAGE_LEN


def planned_context(models: Sequence[str]) -> int:
    """Longest context of a pair of these models that would be compiled with the defaults."""
    return max_context(CompileConfig(), {model: load_config(model) for model in map(resolved, models)})


def source_files(models: Sequence[str], name: str, tick: Callable[[], None]) -> list[list[KnownFile]]:
    """Files of each model with their digests; files that an earlier build has recorded are not read."""
    paths = [model_files(model) for model in models]
    all_paths = [path.resolve() for folder in paths for path in folder]
    try:
        files = read_files(all_paths, known=_known_sources(name), tick=tick)
    except OSError as error:
        path = Path(error.filename or models[0])
        raise artifacts.unreadable(path, error, "ygg compile TARGET DRAFT") from None
    rest = iter(files)
    return [[next(rest) for _ in folder] for folder in paths]


def _known_sources(name: str) -> list[KnownFile]:
    known = []
    for path in artifacts.entries(artifacts.compile_cache() / name, "*/bundle.json"):
        with suppress(ArtifactError, *MALFORMED):
            known += [KnownFile(**source) for source in artifacts.load_json(path, "")["sources"]]
    return known


def model_files(model: str) -> list[Path]:
    """Configuration and weight files of a local model; none for a hub id."""
    if is_gguf(model):
        return [Path(model)]
    folder = Path(model)
    entries = folder.iterdir() if folder.is_dir() else []
    return sorted(
        path for path in entries if path.suffix in (".json", ".safetensors", ".bin") and path.is_file()
    )


def _origin(model: str, files: Sequence[KnownFile]) -> list[str]:
    """What identifies a model: the digests of a folder's files, or a hub id with its commit."""
    from transformers.utils.hub import cached_file

    if files:
        return [file.digest for file in files]
    config_path = cached_file(model, "config.json")  # <cache>/models--<id>/snapshots/<commit>/config.json
    assert config_path is not None, "load_config has read it"
    return [model, Path(config_path).parent.name]
