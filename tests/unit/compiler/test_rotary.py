"""The pass realizes the sines that several layers read, and only those; Inductor computes them once.

Shapes: H = heads, F = features of a head.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from yggdrasil.compiler.rotary import evaluate_sines_once_


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
