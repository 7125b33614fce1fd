"""One rank's shard of a model, by transformers' own tensor-parallel plan.

```
colwise                 q, k, v, gate, up     a rank has some of the outputs: its heads, its features
rowwise                 o, down               a rank has some of the inputs; outputs are summed over ranks
colwise_gather_output   the output embedding  colwise, and every rank gets the whole output
```

The plan is the model's (`model.tp_plan`). The layers below call the collectives, so these are part of the
exported graph. The shards of all ranks have the same shapes and the graph does not depend on the rank: all
ranks share one set of graphs.

Shapes: O = output features, I = input features.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from yggdrasil.errors import ConfigError, UnsupportedModel
from yggdrasil.kernels import gather  # noqa: F401 (defines ygg::gather_ranks)

__all__ = ["GatheredLinear", "SummedLinear", "check_divisible", "shard_"]

GATHERED = ("colwise_gather_output", "colwise_rep")
WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "replicate")
"""Styles of layers that every rank keeps whole.

An embedding reads only one row per token, and a norm of heads has the same few weights for every head.
"""


class SummedLinear(nn.Module):
    """A row-wise layer: partial products, summed over the ranks in rank order and in fp32, then the bias.

    Args:
        linear: The layer of this rank's input features, without bias.
        bias: (out_features), or None.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, bias: Tensor | None, num_ranks: int) -> None:
        super().__init__()
        self.linear = linear
        self.num_ranks = num_ranks
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features / ranks) -> (..., out_features), the same bits on every rank."""
        parts = torch.ops.ygg.gather_ranks(self.linear(x), self.num_ranks).float()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        out: Tensor = (total if self.bias is None else total + self.bias.float()).to(x.dtype)
        return out


class GatheredLinear(nn.Module):
    """A column-wise layer that gathers the whole output on every rank.

    Args:
        linear: The layer of this rank's output features.
    """

    def __init__(self, linear: nn.Linear, num_ranks: int) -> None:
        super().__init__()
        self.linear = linear
        self.num_ranks = num_ranks

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        return torch.cat(list(torch.ops.ygg.gather_ranks(self.linear(x), self.num_ranks)), dim=-1)


def check_divisible(config: Any, num_ranks: int) -> None:
    """Raises ConfigError if a model of this configuration cannot be split evenly; nothing is loaded."""
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key/value heads": getattr(config, "num_key_value_heads", None) or heads,
        "features of a feed-forward layer": getattr(config, "intermediate_size", None) or 0,
    }
    for what, count in counts.items():
        if count % num_ranks:
            raise _indivisible(num_ranks, count, what)


def shard_(model: Any, rank: int, num_ranks: int) -> None:
    """Keep one rank's part of every layer that the model's plan splits, in place.

    Args:
        model: A whole causal LM of transformers.
        rank: The rank whose part is kept; shapes are the same for every rank.

    Raises:
        ConfigError: the number of ranks does not divide the features of a layer.
        UnsupportedModel: the model has no plan, or its plan has an unknown style.

    Aliasing: parts are copies. A view of a tied weight would be stored as the whole weight.
    Source: the styles of transformers' tensor parallelism. Departures: the sum is ordered
    (kernels/gather.py); the input embedding stays whole, and so does an output embedding whose vocabulary
    the number of ranks does not divide.
    """
    plan = {pattern: style for pattern, style in model.tp_plan.items() if style not in WHOLE}
    if not plan:
        raise UnsupportedModel(
            type(model).__name__, "an architecture for which transformers has no tensor-parallel plan"
        )
    layers = {
        name: pattern
        for name, _ in model.named_modules()
        if (pattern := re.sub(r"\.\d+(?=\.)", ".*", name)) in plan
    }
    if unmatched := sorted(plan.keys() - set(layers.values())):
        feature = f"a tensor-parallel plan that names {unmatched[0]!r}, which the model does not have,"
        raise UnsupportedModel(type(model).__name__, feature)
    for name, pattern in layers.items():
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(name)
        shard = _shard(type(model).__name__, module, plan[pattern], rank, num_ranks)
        setattr(model.get_submodule(parent), child, shard)


def _shard(model: str, module: nn.Module, style: str, rank: int, num_ranks: int) -> nn.Module:
    if not isinstance(module, nn.Linear) or style not in ("colwise", "rowwise", *GATHERED):
        raise UnsupportedModel(
            model, f"a tensor-parallel plan with {style!r} for a {type(module).__name__}"
        )
    weight_OI = module.weight
    bias = module.bias
    if style == "rowwise":
        linear = _linear(_part(weight_OI, 1, rank, num_ranks), None)
        return SummedLinear(linear, None if bias is None else bias.detach().clone(), num_ranks)
    if style in GATHERED and module.out_features % num_ranks:
        return module
    bias_part = None if bias is None else _part(bias, 0, rank, num_ranks)
    linear = _linear(_part(weight_OI, 0, rank, num_ranks), bias_part)
    return GatheredLinear(linear, num_ranks) if style in GATHERED else linear


def _part(tensor: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    if tensor.shape[dim] % num_ranks:
        raise _indivisible(num_ranks, tensor.shape[dim], "features of a layer")
    return tensor.detach().chunk(num_ranks, dim)[rank].clone(memory_format=torch.contiguous_format)


def _linear(weight_OI: Tensor, bias: Tensor | None) -> nn.Linear:
    out_features, in_features = weight_OI.shape
    has_bias = bias is not None
    linear = nn.Linear(in_features, out_features, has_bias, device="meta", dtype=weight_OI.dtype)
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _indivisible(num_ranks: int, count: int, what: str) -> ConfigError:
    return ConfigError("--nproc-per-node", num_ranks, f"a number that divides the target's {count} {what}")
