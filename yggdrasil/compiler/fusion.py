"""An FX pass over an exported graph that fuses linear layers with the same input into one operator.

```
gate = packed_linear(x, ..)
up   = packed_linear(x, ..)    silu(gate) * up  ->  gated_linear(x, ..)   if gate and up have no other user
q, k, v = packed_linear(x, ..) of three weights ->  packed_linears(x, ..)[..., slices]
```

The fused operator reads its input once and starts its threads once.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise

import torch
from torch.fx import Graph, Node

__all__ = ["fuse_linears_"]


def fuse_linears_(graph: Graph) -> None:
    """Rewrite the graph of an ExportedProgram in place; its signature stays the same.

    Args:
        graph: Before decomposition; its linear layers are `ygg::packed_linear`.

    Numerics: `packed_linears` writes the bits of its layers. `gated_linear` rounds once; the operators that
    it replaces round three times. Every graph of the menu is rewritten in the same way, so a token has
    the same bits in all of them.
    """
    _fuse_gated_(graph)
    _fuse_shared_inputs_(graph)
    graph.eliminate_dead_code()
    graph.lint()


def _fuse_gated_(graph: Graph) -> None:
    for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        for silu, up in (product.args, product.args[::-1]):
            gate = silu.args[0] if _is_call(silu, torch.ops.aten.silu.default) else None
            if isinstance(gate, Node) and _is_linear(gate) and _is_linear(up) and _can_gate(gate, silu, up):
                _replace_gated_(graph, product, gate, up)
                break


def _can_gate(gate: Node, silu: Node, up: Node) -> bool:
    return (
        all(len(node.users) == 1 for node in (gate, silu, up))
        and gate is not up
        and _arguments(gate)[0] is _arguments(up)[0]
        and _arguments(gate)[3] == _arguments(up)[3]
    )


def _replace_gated_(graph: Graph, product: Node, gate: Node, up: Node) -> None:
    x, gate_weight, gate_bias, out_features = _arguments(gate)
    _, up_weight, up_bias, _ = _arguments(up)
    arguments = (x, gate_weight, gate_bias, up_weight, up_bias, out_features)
    with graph.inserting_before(product):
        fused = graph.call_function(torch.ops.ygg.gated_linear.default, arguments)
    fused.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(fused)
    graph.erase_node(product)


def _fuse_shared_inputs_(graph: Graph) -> None:
    linears = graph.find_nodes(op="call_function", target=torch.ops.ygg.packed_linear.default)
    by_input: dict[Node, list[Node]] = defaultdict(list)
    for linear in linears:
        if linear.users:
            by_input[_arguments(linear)[0]].append(linear)
    for layers in by_input.values():
        if len(layers) > 1:
            _fuse_layers_(graph, layers)


def _fuse_layers_(graph: Graph, layers: list[Node]) -> None:
    """Put the fused operator at the first layer: weights are placeholders, so they precede it too."""
    x = _arguments(layers[0])[0]
    _, *columns = zip(*map(_arguments, layers), strict=True)
    weights, biases, sizes = (list(column) for column in columns)
    with graph.inserting_before(layers[0]):
        fused = graph.call_function(torch.ops.ygg.packed_linears.default, (x, weights, biases, sizes))
        fused.meta["val"] = x.meta["val"].new_empty((*x.meta["val"].shape[:-1], sum(sizes)))
        ends = accumulate(sizes)
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
