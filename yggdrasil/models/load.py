"""Load a causal LM from a folder, a hub id or a GGUF file, refuse unsupported ones, replace its linear
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from yggdrasil.errors import BrokenCheckpoint, ConfigError, ModelMismatch, UnsupportedModel, first_line
from yggdrasil.kernels.linear import PackedLinear
from yggdrasil.models.attention import IMPLEMENTATION, register_attention
from yggdrasil.models.checkpoint import check_pointers, expected_shapes, weight_files
from yggdrasil.models.gguf import check_configuration, check_gguf, check_whole, gguf_format
from yggdrasil.models.hub import check_name, hub_reason, snapshot
from yggdrasil.models.layers import keep_in_config_
from yggdrasil.models.quantised import Scheme, ordinary_weights, scheme_of
from yggdrasil.models.sharding import shard_
from yggdrasil.models.support import check_supported
from yggdrasil.store.sources import is_gguf, loader_arguments

__all__ = [
    "check_vocabularies",
    "load_config",
    "load_model",
    "order_linears_",
    "outline_model",
    "pack_linears_",
    "shared_vocab",
    "stored_format",
]

PICKLED = (AttributeError, EOFError, IndexError, KeyError, TypeError, UnpicklingError)  # of a damaged .bin
LOADING = (OSError, ValueError, RuntimeError, SafetensorError, *PICKLED)


def load_config(name: str) -> Any:
    """The transformers configuration of a model, after the checks of support.py.

    Quantised weights are read as ordinary ones, so the configuration is that of an ordinary model.

    Args:
        name: Folder, hub id or GGUF file.

    Raises:
        ConfigError: there is no such folder or file, and no such model on the hub.
        BrokenCheckpoint: files of the folder are pointers of Git LFS.
        UnsupportedModel: this runtime would read or decode it wrongly.
    """
    from transformers import AutoConfig

    check_name(name)
    if Path(name).is_dir():
        check_pointers(Path(name))
    if is_gguf(name):
        check_gguf(name)
    try:
        config = AutoConfig.from_pretrained(**loader_arguments(name), trust_remote_code=False)
    # code of the architecture checks the configuration and may raise any error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(name, "a model that brings code of its own to run") from None
        reason = first_line(error) if Path(name).exists() else hub_reason(error)
        allowed = (
            "a folder with a config.json that transformers reads, a GGUF file that it reads, or the id of "
            "a model on the hub"
        )
        raise ConfigError("model", name, allowed, reason) from None
    check_supported(name, config)
    if is_gguf(name):
        check_configuration(name, config)
        # the class's default, which the file does not have; the tokenizer knows the file's own
        config.eos_token_id = None
    elif hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def stored_format(name: str) -> str:
    """The format of a model's weights if they are quantised, such as "GPTQ int4, groups of 128"; or empty.

    Args:
        name: Folder, hub id or GGUF file.
    """
    return gguf_format(name) if is_gguf(name) else str(scheme_of(name) or "")


def load_model(name: str, *, dtype: torch.dtype) -> Any:
    """The unmodified transformers model, in evaluation mode, with tree attention.

    Args:
        name: Folder, hub id or GGUF file.

    Raises:
        ConfigError: transformers cannot load it as a causal LM.
        BrokenCheckpoint: tensors are missing, have another shape, or have no place in the model.
        UnsupportedModel: this runtime would decode the architecture wrongly.
    """
    from transformers.utils import logging

    # our own progress display shows the loading
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = load_config(name)
    register_attention()
    try:
        # transformers only warns about missing tensors; _check_whole makes an error of them
        with _only_errors():
            model, found = _loaded(name, config, dtype)
    except LOADING as error:
        raise ConfigError("model", name, "a causal LM that transformers loads", first_line(error)) from None
    _check_whole(name, model, found)
    if is_gguf(name):
        check_whole(name, model)
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(name, "a model without an output embedding")
    return model.eval().requires_grad_(False)


def _loaded(name: str, config: Any, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
    """The model and what transformers reports about its tensors."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": IMPLEMENTATION,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    scheme = scheme_of(name)
    if scheme is None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **loader_arguments(name), trust_remote_code=False, **options
        )
    else:
        tensors = _ordinary_weights(name, scheme, config, dtype)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        loaded = architecture.from_pretrained(None, state_dict=tensors, **options)
    model, found = loaded
    return model, found


def _ordinary_weights(name: str, scheme: Scheme, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    folder = Path(name)
    if not folder.is_dir():
        folder = snapshot(name, "*.json", "*.safetensors")
    files = weight_files(folder)
    if any(path.suffix != ".safetensors" for path in files):
        raise UnsupportedModel(name, f"a checkpoint of {scheme} in a pickle")
    return ordinary_weights(name, scheme, files, expected_shapes(folder, config).keys(), dtype)


@contextmanager
def _only_errors() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_whole(name: str, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Raises BrokenCheckpoint for tensors that are missing or of another shape, and for unused biases.

    Transformers would fill missing tensors at random and ignore biases.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        problem = f"{len(missing)} of the model's tensors are missing, the first is {missing[0]}"
        raise BrokenCheckpoint(name, problem)
    mismatched = sorted(found["mismatched_keys"])
    if mismatched:
        tensor, stored, expected = mismatched[0]
        problem = f"{tensor} is {list(stored)}, where config.json makes it {list(expected)}"
        raise BrokenCheckpoint(name, problem)
    biases = sorted(tensor for tensor in found["unexpected_keys"] if _is_bias(model, tensor))
    if biases:
        problem = f"{len(biases)} biases that config.json has no place for, the first is {biases[0]}"
        raise BrokenCheckpoint(name, problem, "correct config.json")


def _is_bias(model: nn.Module, tensor: str) -> bool:
    layer, _, kind = tensor.rpartition(".")
    return kind == "bias" and isinstance(dict(model.named_modules()).get(layer), nn.Linear)


def pack_linears_(
    model: nn.Module,
    *,
    weights: str = "bf16",
    compress: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Replace every `nn.Linear` by a PackedLinear, in place; for the CPU.

    The order of summation then depends only on the layer.

    Args:
        weights: "bf16" keeps them, "int8" and "int4" round them (kernels/quantisation.py).
        compress: Keep bf16 weights in three quarters of their bytes (kernels/compression.py).
        tick: Called after every layer.
    """

    def pack(name: str, linear: nn.Linear) -> nn.Module:
        packed = PackedLinear.from_linear(linear, weights=weights, compress=compress)
        tick()
        return packed

    _replace_linears_(model, pack)


def outline_model(
    name: str,
    stored: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    ranks: int = 1,
    layers: Sequence[int] | None = None,
) -> Any:
    """The model of stored tensors with uninitialised weights, for a compiler, which reads only shapes.

    No weight is read, and memory that nothing touches is never allocated, so a process that builds graphs
    of a large model stays small.

    Args:
        name: Folder or hub id.
        stored: Parameters and buffers by name; tied ones are one tensor, a packed layer has a `packed`.
        ranks: Number of shards of the model; `stored` is one of them.
        layers: Numbers of the layers that were kept; None for all.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    config = load_config(name)
    if layers is not None:
        keep_in_config_(config, layers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=False
        )  # type: ignore[no-untyped-call]
    if ranks > 1:
        shard_(model, 0, ranks)
    packed = {layer.removesuffix(".packed") for layer in stored if layer.endswith(".packed")}
    _replace_linears_(model, lambda layer, linear: PackedLinear.like(linear) if layer in packed else linear)
    # by identity, so that tied tensors stay tied
    outlines = {id(tensor): torch.empty_like(tensor) for tensor in stored.values()}
    for layer, module in model.named_modules():
        parameters = module.named_parameters(recurse=False)
        buffers = module.named_buffers(recurse=False)
        for child, tensor in [*parameters, *buffers]:
            outline = outlines[id(stored[f"{layer}.{child}".removeprefix(".")])]
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, child, nn.Parameter(outline, requires_grad=False) if is_parameter else outline)
    return model.eval()


def order_linears_(model: nn.Module) -> None:
    """Replace every `nn.Linear` by one on the same weights with a fixed order of summation; for CUDA."""
    # imports Triton, which a CPU does not need
    from yggdrasil.kernels.linear_triton import OrderedLinear

    _replace_linears_(model, lambda name, linear: OrderedLinear(linear))


def _replace_linears_(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(name, module))


def check_vocabularies(target: Any, draft: Any, num_ids: int | None) -> None:
    """Check that vocabularies differ at most by padding, that is, by ids that the tokenizer does not have.

    Args:
        num_ids: One more than the largest id of the common tokenizer. None if the draft has no tokenizer:
            then the sizes must be equal.

    Raises:
        ModelMismatch: names both sizes.
    """
    sizes = target.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] and (num_ids is None or num_ids > min(sizes)):
        raise ModelMismatch("vocabulary size", f"{sizes[0]} tokens", f"{sizes[1]} tokens")


def shared_vocab(target: Any, draft: Any) -> int:
    """V of a pair: the number of ids that both models have.

    Larger ids are padding: they stand for no text, and are neither drafted nor emitted.
    """
    return min(int(target.vocab_size), int(draft.vocab_size))
