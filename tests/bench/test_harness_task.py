"""The tasks for lm-evaluation-harness, and a run of it where it is installed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench import harness_task
from bench.harness_task import TASKS, documents, write_tasks
from yggdrasil.pair import LoadedPair

HARNESS = shutil.which("lm-eval")


def test_a_document_goes_on_with_its_own_sentence_and_not_with_another_one() -> None:
    found = documents(20)
    assert len(found) == 20
    stories = [text.replace("\n", " ") for text in harness_task.STORIES.test_texts]
    for document in found:
        story = next(text for text in stories if text.startswith(document["shown"]))
        assert story[len(document["shown"]) :].lstrip().startswith(document["right"])
        assert document["right"] != document["wrong"]


def test_a_task_is_a_file_with_its_documents(tmp_path: Path) -> None:
    write_tasks(tmp_path, 3)
    for name in TASKS:
        task = json.loads((tmp_path / f"{name}.yaml").read_text())
        assert task["task"] == name
        lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        assert [json.loads(line) for line in lines] == documents(3)


def test_a_program_that_is_not_there_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness_task, "server", lambda pair: pytest.fail("a server was started"))
    monkeypatch.setattr(sys, "argv", ["harness_task", "no-such-program"])
    with pytest.raises(SystemExit) as ended:
        harness_task.main()
    assert ended.value.code == 2
    assert "no-such-program is no program" in capsys.readouterr().err


@pytest.mark.skipif(HARNESS is None, reason="lm-eval is not installed")
def test_the_harness_scores_alike_with_and_without_speculation(
    tiny: LoadedPair,
    llama_folders: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["--documents", "3", "--pair", tiny.bundle.name, "--tokenizer", llama_folders[0]]
    monkeypatch.setattr(sys, "argv", ["harness_task", str(HARNESS), *options])
    with pytest.raises(SystemExit) as ended:
        harness_task.main()
    found = json.loads(capfd.readouterr().out)
    assert ended.value.code == 0
    assert found["equal"]
    assert found["speculative"] == found["plain"]
    assert found["plain"]["story_words"]["sample_len"] == 3
