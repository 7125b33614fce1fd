"""What a compilation reports before it begins: counts, bytes, minutes; and a disk that is too small."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pair
from conftest import TINY
from tiny_pair import SilentProgress

from yggdrasil.bundle import Bundle, bundled_models
from yggdrasil.config import CompileConfig
from yggdrasil.errors import StoreError
from yggdrasil.offline import forecast as module
from yggdrasil.offline import pipeline
from yggdrasil.offline.forecast import Forecast, forecast, last_path
from yggdrasil.offline.inputs import describe_pair
from yggdrasil.offline.traces import CALIBRATION_TEXT
from yggdrasil.store import storage

GB = 10**9
PLAN = Forecast(
    root=Path("/"),
    num_graphs=13,
    written_bytes=0.7e9,
    memory_bytes=2.5e9,
    budget_s=90.0,
    cores=2,
    estimated_s=161.0,
    correction=None,
    is_whole=True,
    is_known=True,
)


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """12.3 GB of disk and 8 GB of memory are free."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(20 * GB, 8 * GB, 12.3e9)
    )
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 8 * GB)


def bundled(config: CompileConfig) -> Bundle:
    target, draft = map(str, bundled_models())
    return describe_pair(target, draft, "none", config, CALIBRATION_TEXT)


@pytest.mark.usefixtures("plenty")
def test_the_lines_have_counts_bytes_and_minutes() -> None:
    assert PLAN.lines() == [
        "13 graphs to compile, about 700 MB to write (12.3 GB free), calibration with a budget of 90 s",
        "about 3 minutes on 2 cores, roughly estimated from the sizes of the models",
    ]
    corrected = replace(PLAN, correction=0.3, cores=1, num_graphs=0)
    assert corrected.lines() == [
        "no graph to compile, about 700 MB to write (12.3 GB free), calibration with a budget of 90 s",
        "about 1 minute on 1 core, judging by the last compilation on this machine",
    ]
    assert len(replace(PLAN, is_known=False).lines()) == 1  # no constants for CUDA
    [*_, note] = replace(PLAN, memory_bytes=28e9).lines()
    assert note.startswith("note: packing may take 28.0 GB of memory, of which 8.0 GB are free")


@pytest.mark.usefixtures("plenty")
def test_a_disk_that_is_too_small_is_refused_in_one_line() -> None:
    PLAN.check_room()
    with pytest.raises(StoreError) as caught:
        replace(PLAN, written_bytes=14e9).check_room()
    assert str(caught.value) == (
        "/: cannot be written (about 14.0 GB are needed, 12.3 GB are free); "
        "make room there, or set YGG_HOME to a folder that has it"
    )


def test_bytes_are_those_that_a_build_has(tiny_bundle: Bundle, tmp_path: Path) -> None:
    written = storage.size_bytes(tiny_bundle.folder / "target" / "weights.safetensors")
    written += storage.size_bytes(tiny_bundle.folder / "draft" / "weights.safetensors")
    new = forecast(replace(tiny_bundle, folder=tmp_path))
    weights = new.written_bytes - new.num_graphs * module.GRAPH_BYTES
    assert weights == pytest.approx(written, rel=0.05)
    assert new.is_whole
    there = forecast(tiny_bundle)
    assert (there.num_graphs, there.written_bytes, there.is_whole) == (0, 0.0, False)
    assert there.estimated_s < new.estimated_s


def test_rounded_weights_and_more_cores_take_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    whole = forecast(bundled(CompileConfig()), 2)
    assert whole.num_graphs == 15
    rounded = forecast(bundled(CompileConfig(weights="int4")), 2)
    assert rounded.written_bytes < whole.written_bytes
    assert forecast(bundled(CompileConfig()), 4).estimated_s < whole.estimated_s
    small = forecast(bundled(CompileConfig(calibration_budget_s=1.0)), 2)
    assert small.estimated_s < whole.estimated_s


def test_a_whole_compilation_corrects_the_next_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    bundle = bundled(TINY)
    first = forecast(bundle)
    assert first.correction is None
    replace(first, is_whole=False).learn(7.0, first.num_graphs)
    first.learn(7.0, first.num_graphs - 1)
    assert not last_path().exists()
    first.learn(3 * first.estimated_s, first.num_graphs)
    assert forecast(bundle).correction == pytest.approx(3.0)
    last_path().write_text("{}")
    assert forecast(bundle).correction is None


def test_a_compilation_reports_what_it_takes_before_it_builds(
    llama_folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    class Noted(SilentProgress):
        def note(self, line: str) -> None:
            lines.append(line)

    def build() -> None:
        assert len(lines) >= 2
        raise InterruptedError

    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    monkeypatch.setattr(pipeline, "build_kernels", build)
    calibration = tiny_pair.save_calibration(tmp_path / "stories.txt")
    with pytest.raises(InterruptedError):
        pipeline.compile_pair(
            *llama_folders, name="new", config=TINY, calibration=calibration, progress=Noted()
        )
    assert " graphs to compile, about " in lines[0]
    assert lines[1].startswith("about ")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 8, 1000))
    with pytest.raises(StoreError, match="are needed, 0 MB are free"):
        pipeline.compile_pair(
            *llama_folders, name="new", config=TINY, calibration=calibration, progress=Noted()
        )
