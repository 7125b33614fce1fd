"""A model with fewer of its layers: what a draft that is made from its target may be.

The layers that remain keep their order and get the numbers 0, 1, 2, ... They have a KV cache of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["keep_in_config_", "keep_layers_", "layer_list", "name_before"]


def layer_list(model: Any) -> str | None:
    """The name of the list of a model's layers; None if it has no single list of that length."""
    count = model.config.num_hidden_layers
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return names[0] if len(names) == 1 else None


def keep_layers_(model: Any, layers: Sequence[int]) -> None:
    """Drop the other layers, also from the model's configuration.

    Args:
        model: A transformers model with a `layer_list`.
        layers: Numbers of the layers that remain, ascending.
    """
    name = layer_list(model)
    assert name is not None
    whole = model.get_submodule(name)
    kept = nn.ModuleList(whole[layer] for layer in layers)
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", place)  # noqa: B010
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, kept)
    keep_in_config_(model.config, layers)


def keep_in_config_(config: Any, layers: Sequence[int]) -> None:
    """Make a configuration that of the model with these layers alone."""
    count = config.num_hidden_layers
    for field, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:  # such as layer_types
            setattr(config, field, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)


def name_before(layer_list: str, layers: Sequence[int]) -> Callable[[str], str]:
    """The name that a tensor of a model had before `keep_layers_`, from its name.

    Args:
        layer_list: Name of the list of layers.
    """
    prefix = f"{layer_list}."

    def before(name: str) -> str:
        if not name.startswith(prefix):
            return name
        place, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{layers[int(place)]}.{rest}"

    return before
