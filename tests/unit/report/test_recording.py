"""A recorder and a recorded model, without a compiled pair; tests/cli has one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from yggdrasil.report.recording import Note, RecordedModel, Recorder
from yggdrasil.report.timeline import Interval


def test_a_recorder_forgets_the_step_it_gave_away() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.stage("verify"):
        raise KeyError
    first = recorder.take("plain", 0, 1)
    assert [stage.name for stage in first.stages] == ["verify"]
    assert recorder.take("plain", 1, 2).stages == ()


FIELDS = {
    "cache": None,
    "device": "cpu",
    "max_depth": 3,
    "sizes": (2, 8, 16),
    "prefill_chunk": 16,
    "widest": 8,
    "num_candidates": 2,
    "vocab": 10,
}


def test_a_recorded_model_gives_what_the_model_gives_and_notes_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = torch.zeros(4, 8), torch.ones(4, 8)
    notes: list[Note] = []
    model = RecordedModel(SimpleNamespace(**FIELDS, forward=lambda meta_NM: outputs), "draft", notes)
    clock = iter((1.0, 1.25))
    monkeypatch.setattr(
        "yggdrasil.report.recording.time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    assert model.forward(torch.zeros(4, 9)) is outputs
    assert [forward.interval for note in notes for forward in note()] == [
        Interval("draft 4", 1000.0, 1250.0, True)
    ]
    assert model.graph_ms == 250.0


def test_forwards_that_ran_in_one_call_are_noted_by_the_graph_that_ran_them() -> None:
    recorder = Recorder()
    model = RecordedModel(SimpleNamespace(**FIELDS), "draft", recorder.graphs)  # type: ignore[arg-type]
    reads = []

    def each() -> list[tuple[int, float, float]]:
        reads.append(recorder)
        return [(3, 5.0, 6.0), (3, 8.0, 11.0)]

    model.record_forwards_(4.0, each)
    assert not reads  # not within the step
    recorder.note(("policy", "draft"), (1.0, 4.0, 12.0))
    step = recorder.take("W=2", 0.0, 13.0)
    assert step.graphs == (Interval("draft 8", 5.0, 6.0, True), Interval("draft 8", 8.0, 11.0, True))
    assert step.stages == (Interval("policy", 1.0, 4.0), Interval("draft", 4.0, 12.0))
    assert model.graph_ms == 4.0
