"""A pass over an exported graph: the sines of rotary embeddings are evaluated once per forward instead of
once per layer and head.

Inductor evaluates a cheap expression anew wherever it is read, and on a CPU its list of what is dear has
exponentials and logarithms but no sines (`should_realize_on_reuse` in torch/_inductor/ir.py). What is read
through `as_strided` it writes to memory first."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

__all__ = ["evaluate_sines_once_"]


def evaluate_sines_once_(graph: Graph) -> None:
    """Let every sine and cosine that has several readers be written where it has its last form.

    Args:
        graph: Of an ExportedProgram for a CPU.

    Numerics: a sine is rounded to the dtype of the model, as eager execution rounds it; in every graph of
    the menu alike."""
    for target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
        for node in graph.find_nodes(op="call_function", target=target):
            form = _last_form(node)
            if len(_readers(form)) > 1 and form.meta["val"].is_contiguous():
                _write_(graph, form)
    graph.lint()


def _last_form(node: Node) -> Node:
    """What becomes of a node while one operator reads it, and nothing else reads it: scaled, rounded,
    reshaped.
    """
    while (
        len(readers := _readers(node)) == 1
        and readers[0].op == "call_function"
        and readers[0].all_input_nodes == [node]
    ):
        [node] = readers
    return node


def _readers(node: Node) -> list[Node]:
    return [user for user in node.users if user.target != torch.ops.aten._assert_tensor_metadata.default]


def _write_(graph: Graph, node: Node) -> None:
    value = node.meta["val"]
    with graph.inserting_after(node):
        written = graph.call_function(
            torch.ops.aten.as_strided.default, (node, list(value.shape), list(value.stride()))
        )
    written.meta["val"] = value
    node.replace_all_uses_with(written, delete_user_cb=lambda reader: reader is not written)
