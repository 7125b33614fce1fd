"""Load a Hugging Face causal LM from a folder or a hub id, refuse what we would decode wrongly, pack its
linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from yggdrasil.models.checkpoint import check_pointers
from yggdrasil.models.hub import check_name, hub_reason
from yggdrasil.models.sharding import shard_
from yggdrasil.models.support import check_supported

__all__ = [
    "check_vocabularies",
    "load_config",
    "load_model",
    "order_linears_",
    "outline_model",
    "pack_linears_",
    "shared_vocab",
]


def load_config(name: str) -> Any:
    """The transformers configuration of a local folder or a hub id, checked.

    Raises:
        ConfigError: no such folder and no such model on the hub.
        BrokenCheckpoint: files of the folder were never fetched.
        UnsupportedModel: an architecture that this runtime would decode wrongly.
    """
    from transformers import AutoConfig

    check_name(name)
    if Path(name).is_dir():
        check_pointers(Path(name))
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (
        Exception
    ) as error:  # a configuration is checked by code of its architecture, which raises what it likes
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(name, "a model that brings code of its own to run") from None
        reason = first_line(error) if Path(name).is_dir() else hub_reason(error)
        raise ConfigError(
            "model",
            name,
            "a folder with a config.json that transformers reads, or the id of a model on the hub",
            reason,
        ) from None
    check_supported(name, config)
    return config


def load_model(name: str, *, dtype: torch.dtype) -> Any:
    """The unmodified transformers model, in evaluation mode, with tree attention.

    Raises:
        ConfigError: not a loadable causal LM.
        BrokenCheckpoint: the checkpoint lacks tensors, or has some that its configuration has no place for.
        UnsupportedModel: an architecture that this runtime would decode wrongly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # loading is a step of our own progress display
    config = load_config(name)
    register_attention()
    try:
        with _errors_alone():  # what else there is to report is an error here
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ConfigError("model", name, "a causal LM that transformers loads", first_line(error)) from None
    model, found = loaded
    _check_whole(name, model, found)
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(name, "a model without an output embedding")
    return model.eval().requires_grad_(False)


@contextmanager
def _errors_alone() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_whole(name: str, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Raises BrokenCheckpoint where a tensor of the model has no value in the checkpoint, or a value has no
    place: transformers fills the first at random.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        raise BrokenCheckpoint(
            name, f"{len(missing)} of the model's tensors are missing, the first is {missing[0]}"
        )
    mismatched = sorted(found["mismatched_keys"])
    if mismatched:
        tensor, stored, expected = mismatched[0]
        raise BrokenCheckpoint(
            name, f"{tensor} is {list(stored)}, where config.json makes it {list(expected)}"
        )
    biases = sorted(tensor for tensor in found["unexpected_keys"] if _is_bias(model, tensor))
    if biases:
        raise BrokenCheckpoint(
            name,
            f"{len(biases)} biases that config.json has no place for, the first is {biases[0]}",
            "correct config.json",
        )


def _is_bias(model: nn.Module, tensor: str) -> bool:
    layer, _, kind = tensor.rpartition(".")
    return kind == "bias" and isinstance(dict(model.named_modules()).get(layer), nn.Linear)


def pack_linears_(
    model: nn.Module, *, compress: bool = False, tick: Callable[[], None] = lambda: None
) -> None:
    """Replace every `nn.Linear` by one that reads a packed copy: the summation order then depends on
    nothing but the layer. For the CPU.

    Args:
        compress: Keep bf16 weights in three quarters of their bytes (kernels/compression.py).
        tick: Called after every layer.
    """

    def pack(name: str, linear: nn.Linear) -> nn.Module:
        packed = PackedLinear.from_linear(linear, compress=compress)
        tick()
        return packed

    _replace_linears_(model, pack)


def outline_model(name: str, stored: Mapping[str, Tensor], *, dtype: torch.dtype, ranks: int = 1) -> Any:
    """The model that `stored` was taken from, with uninitialised weights: for a compiler, which reads
    shapes only.

    No weight is read, and memory that nobody touches is never given: a process that builds graphs of a
    large model stays small.

    Args:
        name: Folder or hub id.
        stored: Its parameters and buffers by name, tied ones as one tensor; packed layers have a "packed".
        ranks: Number of shards of the model; `stored` is one of them.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    config = load_config(name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=False
        )  # type: ignore[no-untyped-call]
    if ranks > 1:
        shard_(model, 0, ranks)
    packed = {layer.removesuffix(".packed") for layer in stored if layer.endswith(".packed")}
    _replace_linears_(model, lambda layer, linear: PackedLinear.like(linear) if layer in packed else linear)
    outlines = {id(tensor): torch.empty_like(tensor) for tensor in stored.values()}
    for layer, module in model.named_modules():
        for child, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            outline = outlines[id(stored[f"{layer}.{child}".removeprefix(".")])]
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, child, nn.Parameter(outline, requires_grad=False) if is_parameter else outline)
    return model.eval()


def order_linears_(model: nn.Module) -> None:
    """Replace every `nn.Linear` by one that adds in the same order whatever runs next to it, on the same
    weights. For CUDA; changes `model` in place.
    """
    from yggdrasil.kernels.linear_triton import OrderedLinear  # imports Triton, which a CPU can do without

    _replace_linears_(model, lambda name, linear: OrderedLinear(linear))


def _replace_linears_(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], make(name, module))


def check_vocabularies(target: Any, draft: Any, num_ids: int | None) -> None:
    """Vocabularies may differ by padding: by ids that the tokenizer does not have.

    Args:
        num_ids: Of the tokenizer that both have, one more than the largest id; None where the draft has
            none, and only the sizes can be compared.

    Raises:
        ModelMismatch: names both sizes.
    """
    sizes = target.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] and (num_ids is None or num_ids > min(sizes)):
        raise ModelMismatch("vocabulary size", f"{sizes[0]} tokens", f"{sizes[1]} tokens")


def shared_vocab(target: Any, draft: Any) -> int:
    """V of a pair: the ids that both models know. What one has beyond them is padding, stands for no text,
    and is neither guessed nor emitted.
    """
    return min(int(target.vocab_size), int(draft.vocab_size))
