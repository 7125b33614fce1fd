"""FX passes over an exported graph for a CPU: rotary embeddings that Inductor lowers well.

The sines are computed once per forward. Inductor inlines a pointwise expression into each of its users
unless it counts the expression as heavy. Its heavy operators on a CPU include exponentials and logarithms
but no sines (`should_realize_on_reuse` in torch/_inductor/ir.py), so every layer and head would compute the
sines again. Inductor realizes the input of `as_strided`, that is, writes it to a buffer; so the pass
inserts an `as_strided`.

A vector is rotated by halves. Models concatenate its halves in the other order before they multiply, and
Inductor writes what is concatenated to a buffer. So the pass concatenates the results:

```
x * cos + cat(-x2, x1) * sin  ->  cat(x1 * cos1 + -x2 * sin1, x2 * cos2 + x1 * sin2)
```
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

__all__ = ["evaluate_sines_once_", "rotate_by_halves_"]

aten = torch.ops.aten


def evaluate_sines_once_(graph: Graph) -> None:
    """Realize every sine and cosine that has several users, in the form in which they read it.

    The graph is that of an ExportedProgram for a CPU; it is changed in place.

    Numerics: a sine is rounded to the model's dtype, as in eager execution and in every graph of the menu.
    """
    for target in (aten.cos.default, aten.sin.default):
        for node in graph.find_nodes(op="call_function", target=target):
            shared = _shared_form(node)
            if len(_users(shared)) > 1 and shared.meta["val"].is_contiguous():
                _realize_(graph, shared)
    graph.lint()


def _shared_form(node: Node) -> Node:
    """The end of the chain of unary operators that scale, round and reshape `node`."""
    while (
        len(users := _users(node)) == 1
        and users[0].op == "call_function"
        and users[0].all_input_nodes == [node]
    ):
        [node] = users
    return node


def _users(node: Node) -> list[Node]:
    """The users that compute something: export adds assertions about dtype and device."""
    return [user for user in node.users if user.target != aten._assert_tensor_metadata.default]


def _realize_(graph: Graph, node: Node) -> None:
    value = node.meta["val"]
    layout = (list(value.shape), list(value.stride()))
    with graph.inserting_after(node):
        realized = graph.call_function(aten.as_strided.default, (node, *layout))
    realized.meta["val"] = value
    node.replace_all_uses_with(realized, delete_user_cb=lambda user: user is not realized)


class _Rotation(NamedTuple):
    """Nodes of `x * cos + cat(-x2, x1) * sin`; `total` is the sum."""

    total: Node
    cos: Node
    minus_second: Node
    first: Node
    sin: Node


def rotate_by_halves_(graph: Graph) -> None:
    """Concatenate the rotated halves of vectors, not the halves before their rotation; in place.

    Numerics: the same products and sums, so the same bits.
    """
    for turned in graph.find_nodes(op="call_function", target=aten.cat.default):
        rotation = _rotation_of(turned)
        if rotation is not None:
            _rotate_by_halves_(graph, rotation)
            graph.eliminate_dead_code()
    graph.lint()


def _rotation_of(turned: Node) -> _Rotation | None:
    """The rotation that `turned`, the concatenation of -x2 and x1, is a part of."""
    halves: Any = turned.args[0]
    if len(halves) != 2 or not _is(halves[0], aten.neg):
        return None
    minus_second, first = halves
    second = minus_second.args[0]
    product = _only_user(turned, aten.mul)
    total = product and _only_user(product, aten.add)
    if not (product and total and _is(first, aten.slice) and _is(second, aten.slice)):
        return None
    x = first.args[0]
    sin = _other(product, turned)
    unturned = _other(total, product)
    if unturned is None or not _is(unturned, aten.mul) or _only_user(unturned, aten.add) is not total:
        return None
    cos = _other(unturned, x)
    half = x.meta["val"].shape[-1] // 2
    if not (cos and sin and all(node.meta["val"].shape[-1] == 2 * half for node in (cos, sin))):
        return None
    is_last = turned.args[1:] in ((-1,), (x.meta["val"].dim() - 1,))
    are_halves = _last_range(first, x) == (0, half) and _last_range(second, x) == (half, 2 * half)
    return _Rotation(total, cos, minus_second, first, sin) if is_last and are_halves else None


def _is(node: Any, packet: Any) -> bool:
    return isinstance(node, Node) and getattr(node.target, "overloadpacket", None) is packet


def _only_user(node: Node, packet: Any) -> Node | None:
    """The only user, if it is a call of this operator."""
    users = _users(node)
    return users[0] if len(users) == 1 and _is(users[0], packet) else None


def _other(node: Node, one: Node) -> Node | None:
    """The other of the two arguments, if it is a tensor and `one` is an argument, too."""
    others = [argument for argument in node.args if argument is not one]
    [other] = others if len(others) == 1 and len(node.args) == 2 and not node.kwargs else [None]
    return other if isinstance(other, Node) else None


def _last_range(part: Node, whole: Node) -> tuple[int, int] | None:
    """Where a slice of the last dimension of `whole` begins and ends."""
    of, dim, begin, end = part.args
    size = whole.meta["val"].shape[-1]
    is_last = of is whole and dim in (-1, whole.meta["val"].dim() - 1)
    return (begin, min(end, size)) if is_last else None  # type: ignore[return-value]


def _rotate_by_halves_(graph: Graph, rotation: _Rotation) -> None:
    total, cos, minus_second, first, sin = rotation
    half = first.meta["val"].shape[-1]

    def call(target: Any, *arguments: Any) -> Node:
        node = graph.call_function(target, arguments)
        values = [each.meta["val"] if isinstance(each, Node) else each for each in arguments]
        node.meta["val"] = target(*values)
        return node

    with graph.inserting_before(total):
        cos_1, cos_2, sin_1, sin_2 = (
            call(aten.slice.Tensor, factor, -1, begin, begin + half)
            for factor in (cos, sin)
            for begin in (0, half)
        )
        second = minus_second.args[0]
        sums = [
            call(aten.add.Tensor, call(aten.mul.Tensor, one, cos_of), call(aten.mul.Tensor, other, sin_of))
            for one, cos_of, other, sin_of in (
                (first, cos_1, minus_second, sin_1),
                (second, cos_2, first, sin_2),
            )
        ]
        rotated = graph.call_function(aten.cat.default, (sums, -1))
    rotated.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(rotated)
