"""One pass realizes the sines that several layers read, and only those; Inductor computes them once. The
other rotates vectors by halves.

Shapes: H = heads, F = features of a head.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from yggdrasil.compiler.rotary import evaluate_sines_once_, rotate_by_halves_


class Rotary(nn.Module):
    """Rotary embeddings as in decoders: one cosine and one sine of the angles, which every layer reads."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.register_buffer("frequencies", torch.linspace(1.0, 0.1, 16))

    def forward(self, x_NHF: Tensor, position_N: Tensor) -> Tensor:
        angle_NF = (position_N[:, None].float() * self.frequencies).repeat(1, 2)
        cos_NF = (angle_NF.cos() * 1.0).to(x_NHF.dtype)
        sin_NF = (angle_NF.sin() * 1.0).to(x_NHF.dtype)
        for _ in range(self.num_layers):
            x_NHF = torch.relu(x_NHF * cos_NF[:, None] + x_NHF.flip(-1) * sin_NF[:, None])
            # a matrix product ends the kernel that Inductor generates
            x_NHF = x_NHF @ torch.eye(32, dtype=x_NHF.dtype)
        return x_NHF


def exported(num_layers: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    arguments = torch.randn(3, 4, 32).bfloat16(), torch.arange(3)
    return torch.export.export(Rotary(num_layers), arguments), arguments


def realized(program: Any) -> list[Any]:
    target = torch.ops.aten.as_strided.default
    return program.graph_module.graph.find_nodes(op="call_function", target=target)


def test_sines_of_several_users_are_realized_in_the_model_s_dtype() -> None:
    program, arguments = exported(3)
    before = program.module()(*arguments)
    evaluate_sines_once_(program.graph_module.graph)
    program.graph_module.recompile()
    assert [node.meta["val"].dtype for node in realized(program)] == [torch.bfloat16] * 2
    assert torch.equal(program.module()(*arguments), before)


def test_sines_of_one_user_are_left_to_inductor() -> None:
    program, _ = exported(1)
    evaluate_sines_once_(program.graph_module.graph)
    assert not realized(program)


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_inductor_computes_sines_once_only_after_the_pass(is_rewritten: bool) -> None:
    """When the half without the pass fails, Inductor has become better and the pass can be removed."""
    from torch._inductor.utils import run_and_get_code

    program, arguments = exported(3)
    if is_rewritten:
        evaluate_sines_once_(program.graph_module.graph)
        program.graph_module.recompile()
    _, [code] = run_and_get_code(torch.compile(program.module(), fullgraph=True), *arguments)
    calls = re.findall(r"^ +cpp_fused\w*_cos_\w*\(", code, re.MULTILINE)
    assert len(calls) == (1 if is_rewritten else 3)


class Function(nn.Module):
    """A function of a vector, cosines and sines as a module that can be exported."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x_HNF: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> Tensor:
        result: Tensor = self.function(x_HNF, cos_NF, sin_NF)
        return result


def turned(x_HNF: Tensor, half: int = 16, dim: int = -1) -> Tensor:
    return torch.cat((-x_HNF[..., half:], x_HNF[..., :half]), dim)


def turned_back(x_HNF: Tensor) -> Tensor:
    return torch.cat((-x_HNF[..., :16], x_HNF[..., 16:]), -1)


def used_twice(turned_HNF: Tensor, x_HNF: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> Tensor:
    return x_HNF * cos_NF + turned_HNF * sin_NF + turned_HNF


def is_turned_first(program: Any) -> bool:
    """Whether halves are concatenated before they are rotated."""
    nodes = program.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    return any(half.target == torch.ops.aten.neg.default for node in nodes for half in node.args[0])


@pytest.mark.parametrize(
    ("function", "is_rotation"),
    [
        (lambda x, cos, sin: x * cos + turned(x) * sin, True),
        (lambda x, cos, sin: sin * turned(x, dim=2) + cos * x, True),
        (lambda x, cos, sin: x * cos + turned(x, half=12) * sin, False),
        (lambda x, cos, sin: x * cos + turned_back(x) * sin, False),
        (lambda x, cos, sin: x * cos + turned(x * sin), False),
        (lambda x, cos, sin: x * cos + turned(x) * sin[:, :1], False),
        (lambda x, cos, sin: x.relu() * cos + turned(x) * sin, False),
        (lambda x, cos, sin: used_twice(turned(x), x, cos, sin), False),
    ],
)
def test_vectors_are_rotated_by_halves_with_the_same_bits(function: Any, is_rotation: bool) -> None:
    """What is no rotation stays as it is."""
    arguments = [torch.randn(*shape).bfloat16() for shape in ((3, 4, 32), (4, 32), (4, 32))]
    program: Any = torch.export.export(Function(function), tuple(arguments))
    before = program.module()(*arguments)
    nodes_before = len(program.graph_module.graph.nodes)
    rotate_by_halves_(program.graph_module.graph)
    program.graph_module.recompile()
    is_rewritten = len(program.graph_module.graph.nodes) != nodes_before
    assert is_rewritten == is_rotation
    assert is_turned_first(program) != is_rotation
    assert torch.equal(program.module()(*arguments), before)


def test_inductor_writes_no_turned_vector_after_the_pass() -> None:
    from torch._inductor.utils import run_and_get_code

    arguments = [torch.randn(*shape).bfloat16() for shape in ((3, 4, 32), (4, 32), (4, 32))]
    buffers = []
    for is_rewritten in (False, True):
        program: Any = torch.export.export(
            Function(lambda x, cos, sin: x * cos + turned(x) * sin), tuple(arguments)
        )
        if is_rewritten:
            rotate_by_halves_(program.graph_module.graph)
            program.graph_module.recompile()
        _, [code] = run_and_get_code(torch.compile(program.module(), fullgraph=True), *arguments)
        buffers.append(len(re.findall(r"= empty_strided_cpu\(", code)))
    assert buffers == [2, 1]
