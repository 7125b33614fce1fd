"""The C entry points of operators.cpp, declared from the operators' schemas as AOTInductor wants them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["c_shims"]

WITH_ENTRY_POINT = (
    "packed_linear",
    "read_linear",
    "packed_linears",
    "gated_linear",
    "attend",
    "candidates",
)

C_TYPES = {
    "Tensor": ("AtenTensorHandle",),
    "Optional[Tensor]": ("AtenTensorHandle*",),
    "List[Tensor]": ("const AtenTensorHandle*", "int64_t"),
    "List[Optional[Tensor]]": ("const AtenTensorHandle**", "int64_t"),
    "List[int]": ("const int64_t*", "int64_t"),
    "int": ("int64_t",),
    "float": ("double",),
}
"""The C parameters of an argument by the type in its schema; the second one is the length of a list."""


def c_shims() -> dict[Any, list[str]]:
    """Operator to declaration, for Inductor's `custom_ops_to_c_shims`; the library must be loaded."""
    overloads = [getattr(torch.ops.ygg, name).default for name in WITH_ENTRY_POINT]
    return {overload: [_declaration(overload._schema)] for overload in overloads}


def _declaration(schema: Any) -> str:
    name = schema.name.removeprefix("ygg::")
    parameters = []
    for argument in schema.arguments:
        c_type, *length_type = C_TYPES[str(argument.type)]
        parameters.append(f"{c_type} {argument.name}")
        parameters += [f"{each} num_{argument.name}" for each in length_type]
    parameters += [f"AtenTensorHandle* {output.name or 'out'}" for output in schema.returns]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(parameters)})"
