"""`ygg show step` on a compiled pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from yggdrasil.cli import main
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.report.recording import record_timeline
from yggdrasil.report.timeline import BETWEEN, plot_timeline

PNG = b"\x89PNG\r\n"
PROMPT = "Once upon a time"


@pytest.fixture
def speculating(tiny: LoadedPair) -> LoadedPair:
    """The tiny pair by the profile of a machine where drafting is all but free, so that its policy
    speculates.
    """
    fast, slow = (Curve((0,), (1,), ((ms,),)) for ms in (0.001, 1.0))
    return replace(tiny, latency=LatencyModel(fast, slow, 0.0, 0.0, 0.0))


def test_every_gap_of_a_recorded_step_has_a_name(speculating: LoadedPair, tmp_path: Path) -> None:
    timeline = record_timeline(speculating, speculating.tokenizer.encode(PROMPT), num_steps=4)
    assert len(timeline.steps) >= 4
    step = timeline.representative
    found = [interval.name for interval in step.intervals() if interval.name != BETWEEN]
    assert found[:4] == ["choose shape", "head", "draft 4", "grow 1"]
    assert found[-7:] == ["prune", "pack", step.graphs[-1].name, "outputs", "accept", "commit", "observe"]
    assert step.graphs[-1].name in ("verify 2", "verify 4", "verify 8", "verify 16")
    assert {graph.name for graph in step.graphs[:-1]} <= {"draft 4"}
    assert plot_timeline(step, tmp_path / "step.png").read_bytes().startswith(PNG)


def test_recording_leaves_the_engine_and_the_text_as_they_were(speculating: LoadedPair) -> None:
    engine = speculating.engine
    before = engine.target, engine.draft, engine.trace, dict(engine.trace.count)
    record_timeline(speculating, speculating.tokenizer.encode(PROMPT), num_steps=1)
    assert before == (engine.target, engine.draft, engine.trace, dict(engine.trace.count))


def test_a_prompt_that_leaves_no_step_after_the_warm_up_is_refused(tiny: LoadedPair) -> None:
    with pytest.raises(ConfigError, match="255 tokens"):
        record_timeline(tiny, [5] * (tiny.bundle.max_context - 1))


@pytest.mark.usefixtures("tiny_bundle")
def test_show_step_prints_the_intervals_and_writes_a_png(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", "step", PROMPT, "--pair", "tiny", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for words in (
        "choose shape",
        "pack",
        "[verify ",
        "accept",
        "commit",
        BETWEEN,
        "graphs ",
        "host ",
        "tiny-step.png",
    ):
        assert words in out
    assert (tmp_path / "tiny-step.png").read_bytes().startswith(PNG)
