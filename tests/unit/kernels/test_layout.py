"""Constants and declarations that Python and C++ both have are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from yggdrasil import kernels, layout
from yggdrasil.kernels.shims import RUNTIME, c_shims

FOLDER = Path(kernels.__file__).parent


def constants_of_header() -> dict[str, int]:
    """`kPageLen = 16` as PAGE_LEN: 16."""
    found = re.findall(r"\bk(\w+) = (\d+)[,;]", (FOLDER / "layout.h").read_text())
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): int(value) for name, value in found}


def test_the_header_has_the_constants_of_the_layout() -> None:
    assert constants_of_header() == {name: getattr(layout, name) for name in layout.__all__}


@pytest.mark.usefixtures("kernels")
def test_entry_points_are_defined_as_they_are_declared() -> None:
    source = re.sub(r"\s+", "", (FOLDER / "operators.cpp").read_text())
    declarations = [declaration for each in c_shims().values() for declaration in each]
    declarations.remove(RUNTIME)
    assert len(declarations) == source.count("AOTITorchErroraoti_torch_cpu_")
    for declaration in declarations:
        assert re.sub(r"\s+", "", declaration) + "{" in source


def test_the_templates_of_the_runtime_are_compiled_as_they_are_declared() -> None:
    statements = re.compile(r"^(?:extern )?(template [^;]*;)$", re.MULTILINE)
    compiled = statements.findall((FOLDER / "runtime.cpp").read_text())
    assert len(compiled) == 5
    # inlined, it would be compiled in every graph
    declared = RUNTIME.replace("__attribute__((noinline)) ", "")
    assert [re.sub(r"\s+", " ", each) for each in statements.findall(declared)] == [
        re.sub(r"\s+", " ", each) for each in compiled
    ]
