"""The worker processes that build graphs: a failure ends them all and leaves no file."""

from pathlib import Path

import pytest

from yggdrasil.compiler.workers import DEEP, LARGE_LAYER, GraphJob, compile_graphs, is_deep
from yggdrasil.kv import KVShape


def test_a_failure_ends_all_workers_and_names_its_graph(tmp_path: Path, kernels: None) -> None:
    kv = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, capacity=16)
    (tmp_path / ".4.pt2.abandon8").mkdir()
    jobs = [
        GraphJob(
            model=str(tmp_path / "nowhere"),
            weights=str(tmp_path),
            num_candidates=0,
            vocab=384,
            dtype="float32",
            device="cpu",
            kv=kv,
            max_depth=2,
            num_tokens=size,
            path=str(tmp_path / f"{size}.pt2"),
        )
        for size in (2, 4, 8, 16)
    ]
    done: list[GraphJob] = []
    with pytest.raises(RuntimeError, match="could not be built"):
        compile_graphs(jobs, num_workers=2, on_done=done.append)
    assert done == []
    assert list(tmp_path.iterdir()) == []


def test_only_many_large_layers_are_built_by_region() -> None:
    large = DEEP * LARGE_LAYER
    assert is_deep(DEEP, large, "cpu")
    assert not is_deep(DEEP - 1, large, "cpu")
    assert not is_deep(DEEP, large - 1, "cpu")
    assert not is_deep(DEEP, large, "cuda")
