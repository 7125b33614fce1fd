"""What graphs take from our library: the C entry points of operators.cpp, declared from the schemas as
AOTInductor wants them, and the templates of runtime.cpp.
"""

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

RUNTIME = """\
"C++" {
#ifdef __GLIBCXX__
extern template class std::basic_regex<char>;
extern template class std::__detail::_Compiler<std::regex_traits<char>>;
extern template class std::__detail::_NFA<std::regex_traits<char>>;
extern template class std::__detail::_Scanner<char>;
extern template __attribute__((noinline)) bool std::regex_match(const std::string&, std::smatch&,
                                                                const std::regex&,
                                                                std::regex_constants::match_flag_type);
#endif
}"""
"""The templates of runtime.cpp. Inductor writes `extern` before this block, in one of C entry points.

Inlined, `regex_match` would be compiled in every graph.
"""


def c_shims() -> dict[Any, list[str]]:
    """Operator to declarations, for Inductor's `custom_ops_to_c_shims`; the library must be loaded.

    Inductor has no option for other declarations, so those of the templates are the first operator's.
    """
    overloads = [getattr(torch.ops.ygg, name).default for name in WITH_ENTRY_POINT]
    declarations = {overload: [_declaration(overload._schema)] for overload in overloads}
    declarations[overloads[0]].append(RUNTIME)
    return declarations


def _declaration(schema: Any) -> str:
    name = schema.name.removeprefix("ygg::")
    parameters = []
    for argument in schema.arguments:
        c_type, *length_type = C_TYPES[str(argument.type)]
        parameters.append(f"{c_type} {argument.name}")
        parameters += [f"{each} num_{argument.name}" for each in length_type]
    parameters += [f"AtenTensorHandle* {output.name or 'out'}" for output in schema.returns]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(parameters)})"
