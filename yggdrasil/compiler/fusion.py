"""A pass over an exported graph: linear layers that read the same input become one operator, which reads it
once and starts its threads once.

```
gate = packed_linear(x, ..)                         gated_linear(x, ..)     if nothing else reads gate or up
up   = packed_linear(x, ..)    silu(gate) * up  ->
q, k, v = packed_linear(x, ..) of three weights ->  packed_linears(x, ..)[..., slices]
```
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch.fx import Graph, Node

__all__ = ["fuse_linears_"]


def fuse_linears_(graph: Graph) -> None:
    """Rewrite an exported graph in place; outputs stay in their places.

    Args:
        graph: Of an ExportedProgram, before decomposition, with `ygg::packed_linear` where the model has
            linear layers.

    Numerics: `packed_linears` writes the bits of its layers; `gated_linear` rounds once where three
    operators round three times. Either way every graph of the menu is rewritten alike, so a token has the
    same bits in all of them."""
    _fuse_gated_(graph)
    _fuse_shared_inputs_(graph)
    graph.eliminate_dead_code()
    graph.lint()


def _fuse_gated_(graph: Graph) -> None:
    for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        for silu, up in (product.args, product.args[::-1]):
            gate = silu.args[0] if _is_call(silu, torch.ops.aten.silu.default) else None
            if isinstance(gate, Node) and _is_linear(gate) and _is_linear(up) and _can_gate(gate, silu, up):
                x, gate_weight, gate_bias, out_features = _arguments(gate)
                with graph.inserting_before(product):
                    fused = graph.call_function(
                        torch.ops.ygg.gated_linear.default,
                        (x, gate_weight, gate_bias, *_arguments(up)[1:3], out_features),
                    )
                fused.meta["val"] = product.meta["val"]
                product.replace_all_uses_with(fused)
                graph.erase_node(product)
                break


def _can_gate(gate: Node, silu: Node, up: Node) -> bool:
    read_once = all(len(node.users) == 1 for node in (gate, silu, up))
    return (
        read_once
        and gate is not up
        and _arguments(gate)[0] is _arguments(up)[0]
        and _arguments(gate)[3] == _arguments(up)[3]
    )


def _fuse_shared_inputs_(graph: Graph) -> None:
    linears = graph.find_nodes(op="call_function", target=torch.ops.ygg.packed_linear.default)
    order = {node: place for place, node in enumerate(linears)}
    by_input = sorted(
        (node for node in linears if node.users), key=lambda node: (str(_arguments(node)[0]), order[node])
    )
    for _, group in groupby(by_input, key=lambda node: _arguments(node)[0]):
        layers = list(group)
        if len(layers) > 1:
            _fuse_layers_(graph, layers)


def _fuse_layers_(graph: Graph, layers: list[Node]) -> None:
    """Weights are placeholders, so whatever the first layer has, the others have too."""
    x = _arguments(layers[0])[0]
    weights, biases, sizes = (
        list(column) for column in list(zip(*map(_arguments, layers), strict=True))[1:]
    )
    with graph.inserting_before(layers[0]):
        fused = graph.call_function(torch.ops.ygg.packed_linears.default, (x, weights, biases, sizes))
        fused.meta["val"] = x.meta["val"].new_empty((*x.meta["val"].shape[:-1], sum(sizes)))
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        for layer, (start, end) in zip(layers, pairwise([0, *ends]), strict=True):
            part = graph.call_function(torch.ops.aten.slice.Tensor, (fused, -1, start, end))
            part.meta["val"] = fused.meta["val"][..., start:end]
            layer.replace_all_uses_with(part)
    for layer in layers:
        graph.erase_node(layer)


def _arguments(linear: Node) -> tuple[Node, Node, Node | None, int]:
    """Input, weight, bias and output features."""
    x, packed, bias, out_features = linear.args
    return x, packed, bias, out_features  # type: ignore[return-value]


def _is_call(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target == target


def _is_linear(node: object) -> bool:
    return _is_call(node, torch.ops.ygg.packed_linear.default)
