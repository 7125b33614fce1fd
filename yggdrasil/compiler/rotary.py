"""An FX pass over an exported graph: the sines of rotary embeddings are computed once per forward.

Inductor inlines a pointwise expression into each of its users unless it counts the expression as heavy. Its
heavy operators on a CPU include exponentials and logarithms but no sines (`should_realize_on_reuse` in
torch/_inductor/ir.py), so every layer and head would compute the sines again. Inductor realizes the input
of `as_strided`, that is, writes it to a buffer; so the pass inserts an `as_strided`.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

__all__ = ["evaluate_sines_once_"]


def evaluate_sines_once_(graph: Graph) -> None:
    """Realize every sine and cosine that has several users, in the form in which they read it.

    The graph is that of an ExportedProgram for a CPU; it is changed in place.

    Numerics: a sine is rounded to the model's dtype, as in eager execution and in every graph of the menu.
    """
    for target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
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
    return [user for user in node.users if user.target != torch.ops.aten._assert_tensor_metadata.default]


def _realize_(graph: Graph, node: Node) -> None:
    value = node.meta["val"]
    layout = (list(value.shape), list(value.stride()))
    with graph.inserting_after(node):
        realized = graph.call_function(torch.ops.aten.as_strided.default, (node, *layout))
    realized.meta["val"] = value
    node.replace_all_uses_with(realized, delete_user_cb=lambda user: user is not realized)
