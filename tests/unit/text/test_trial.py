"""Trials of grammars: a limit of time and of memory, and that one trial does not change the next."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from yggdrasil.pair import LoadedPair
from yggdrasil.text.grammar import LIMITS
from yggdrasil.text.trial import Trial, Verdict, _ended

MANY_PATTERNS = {"type": "string", "allOf": [{"pattern": f"a.{{{gap}}}b"} for gap in range(1, 60)]}


def rules(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


@pytest.fixture(scope="module")
def trial(tiny: LoadedPair) -> Iterator[Trial]:
    ends = sorted(tiny.bundle.eos_tokens)
    setup = {"tokenizer": tiny.tokenizer.source, "vocab": tiny.bundle.vocab, "ends": ends}
    yield Trial({**setup, "limits": LIMITS}, most_s=1)


def test_a_grammar_that_takes_hours_is_stopped_and_the_next_one_is_tried(trial: Trial) -> None:
    for schema in (MANY_PATTERNS, {"type": "integer", "multipleOf": 999_983}):
        verdict = trial.run(rules(schema))
        assert re.fullmatch(r"it is too complex: it does not compile in (1 s|256 MB)", verdict.fault)
    assert trial.run(rules({"type": "integer"})).fault == ""


def test_a_fault_has_its_place(trial: Trial) -> None:
    schema = {"properties": {"a": {"items": {"type": "b"}}, "c": {"type": "null"}}}
    assert trial.run(rules(schema)).place == "/properties/a/items"
    assert trial.run(rules({"type": "b"})).place == ""


def test_a_process_that_was_ended_is_started_again(trial: Trial) -> None:
    trial.run(rules({}))
    process = trial._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert trial.run(rules({})).fault == ""
    assert trial._process is not process


def test_a_process_that_ends_within_a_trial_is_no_fault_of_the_grammar(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = trial._running
    processes = []

    def killed() -> Any:
        process = running()
        processes.append(process)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(trial, "_running", killed)
    with pytest.raises(ChildProcessError, match="ended twice"):
        trial.run(rules({}))
    assert len(processes) == 2
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    monkeypatch.undo()
    assert trial.run(rules({})).fault == ""


def test_a_trial_that_the_system_kills_is_repeated_and_never_a_verdict(trial: Trial) -> None:
    trial.run(rules({}))
    process = trial._process
    assert process is not None
    num_killed = 0
    is_over = threading.Event()

    def kill_trials() -> None:
        nonlocal num_killed
        while not is_over.is_set():
            for fork in psutil.Process(process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    fork.kill()
                    num_killed += 1
            time.sleep(0.01)

    killer = threading.Thread(target=kill_trials)
    killer.start()
    try:
        with pytest.raises(ChildProcessError, match="ended twice"):
            trial.run(rules(MANY_PATTERNS))
    finally:
        is_over.set()
        killer.join()
    assert num_killed >= 2
    assert trial._process is process
    assert "does not compile in" in trial.run(rules(MANY_PATTERNS)).fault


@pytest.mark.parametrize(
    ("ended_by", "used_s", "limit"),
    [
        (signal.SIGXCPU, 2.0, "2 s"),
        (signal.SIGKILL, 3.0, "2 s"),
        (signal.SIGABRT, 0.4, "256 MB"),
        (signal.SIGSEGV, 0.4, "256 MB"),
        (signal.SIGKILL, 0.4, None),
        (signal.SIGTERM, 0.4, None),
    ],
)
def test_only_a_limit_of_the_trial_is_a_fault_of_the_grammar(
    ended_by: signal.Signals, used_s: float, limit: str | None
) -> None:
    verdict = _ended(ended_by.value, used_s, 2)
    assert verdict == (limit and Verdict(f"it is too complex: it does not compile in {limit}"))


def test_the_process_ends_with_its_trial(tiny: LoadedPair) -> None:
    setup = {"tokenizer": tiny.tokenizer.source, "vocab": tiny.bundle.vocab, "ends": [0], "limits": LIMITS}
    trial = Trial(setup)
    trial.run(rules({}))
    process = trial._process
    assert process is not None
    del trial
    assert process.poll() is not None
