"""Building one graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn
from torch._inductor import package

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
