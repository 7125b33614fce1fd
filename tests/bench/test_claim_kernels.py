"""The kernel benchmark's arithmetic by hand, its report, and its error without a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from bench import claim_kernels
from bench.claim_kernels import CLAIM, MODELS, attention_json, draw, gb_per_s, goals, table, tree_meta
from yggdrasil.layout import INDEX, PATH, PREFIX


def test_a_machine_without_a_device_gets_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        CLAIM.main(["--quick", "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "needs a CUDA device" in captured.err


def test_rates_are_bytes_over_time() -> None:
    assert gb_per_s(3_000_000_000, [1000.0, 1000.0])["median"] == 3.0
    assert MODELS[0].kv_bytes(512) == 32 * 2 * 32 * 128 * 2 * 512
    assert MODELS[1].kv_bytes(512) == MODELS[0].kv_bytes(512) // 4


def measured(context: int, width: int, share: float) -> dict[str, Any]:
    model = MODELS[0]
    copy = 1000.0
    return attention_json(model, context, width, [model.kv_bytes(context) / (share * copy) / 1e6] * 2, copy)


def test_attention_is_charged_for_the_context_and_compared_with_the_copy() -> None:
    found = measured(2048, 4, 0.5)
    assert found["share"] == pytest.approx(0.5)
    assert found["layer_us"]["median"] == pytest.approx(
        MODELS[0].kv_bytes(2048) / 32 / 500e9 * 1e6, rel=1e-3
    )


def test_goals_take_the_worst_width() -> None:
    attention = [
        measured(2048, 1, 0.6),
        measured(2048, 64, 0.45),
        measured(8192, 1, 0.8),
        measured(512, 1, 0.1),
    ]
    reached = {goal["goal"]: goal["reached"] for goal in goals(0.9, attention, 11.0)}
    assert reached == {
        "migration over copy": True,
        "attention over copy, Llama-2-7B, context 2048": False,
        "attention over copy, Llama-2-7B, context 8192": True,
        "us of a commit": False,
    }


def test_trees_have_the_width_asked_for_and_paths_that_the_metadata_holds() -> None:
    for width in claim_kernels.WIDTHS:
        meta_NM = tree_meta(width, 512)
        assert meta_NM[:, INDEX].tolist() == list(range(512, 512 + width))
        assert (meta_NM[:, PREFIX] == 512).all()
        assert (meta_NM[:, PATH] == 0).all()  # every path begins with the root


def test_the_table_and_the_figure_show_every_width() -> None:
    attention = [measured(context, width, 0.5) for context in (512, 2048) for width in (1, 64)]
    result = {
        "copy_gb_per_s": {"median": 1000.0},
        "migration_gb_per_s": {"migration": {"median": 900.0}},
        "migrated_bytes": 10_000_000,
        "attention": attention,
        "commit_us": {"median": 4.0},
        "goals": goals(0.9, attention, 4.0),
        "tune": [{"lanes": 16, "ms": 1.5}],
    }
    text = table(result)
    assert "MISSED " not in text
    assert "migration 900 GB/s, 10 MB" in text
    assert "1.500 ms  lanes 16" in text
    figure = Figure()
    draw(figure, result)
    assert [len(axes.get_lines()) for axes in figure.axes] == [3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_exact_at_the_sizes_that_are_timed() -> None:
    for model in MODELS:
        claim_kernels.assert_exact(claim_kernels.Subject(model, 512), 512)
