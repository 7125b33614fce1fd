"""Building one graph."""

from __future__ import annotations

import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
from torch import Tensor, nn
from torch._inductor import package

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.graphs import compile_graph
from yggdrasil.models.packing import empty_meta


class Doubled(nn.Module):
    """A graph of one product."""

    def forward(self, meta_NM: Tensor) -> Tensor:
        return meta_NM.float() * 2


@pytest.mark.usefixtures("kernels")
def test_two_builds_of_the_same_graph_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands may build one graph at the same time, while Inductor writes its sources."""
    written: list[set[str]] = []
    package_aoti = package.package_aoti

    def recorded(archive: str, files: list[str]) -> str:
        written.append(set(files))
        return package_aoti(archive, files)

    monkeypatch.setattr(package, "package_aoti", recorded)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        compile_graph(Doubled(), empty_meta(2, 4), tmp_path / name / "graph.pt2")
    first, second = written
    assert first and second
    assert not first & second
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["graph.pt2"]


def test_a_graph_takes_the_templates_of_the_runtime_from_our_library(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    graph = min(tiny_bundle.folder.rglob("*.pt2"))
    with ZipFile(graph) as archive:
        [library] = [name for name in archive.namelist() if name.endswith(".so")]
        path = archive.extract(library, tmp_path)
    command = ["nm", "--dynamic", "--demangle", "--undefined-only", path]
    missing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "basic_regex<char" in missing
    assert "regex_match<" in missing
