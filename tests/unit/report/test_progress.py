"""Progress lines where there is no terminal for a bar."""

from __future__ import annotations

import re
import time

import pytest

from yggdrasil.report.progress import RichProgress


def test_a_phase_is_a_line_at_its_beginning_and_one_at_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    progress = RichProgress(begun_s=0.01)
    with progress.phase("pack target", 2):
        time.sleep(0.2)
        assert capfd.readouterr().err.splitlines() == ["pack target ..."]
    assert re.fullmatch(r"pack target +\d+\.\d s", capfd.readouterr().err.strip())


def test_a_short_phase_is_one_line_and_one_that_fails_at_once_is_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    progress = RichProgress()
    with progress.phase("check the pair", 2):
        pass
    assert len(capfd.readouterr().err.splitlines()) == 1
    with pytest.raises(ValueError, match="wrong"), progress.phase("check the pair", 2):
        raise ValueError("wrong")
    assert capfd.readouterr().err == ""


def test_a_long_phase_prints_its_state_and_the_time_left(capfd: pytest.CaptureFixture[str]) -> None:
    progress = RichProgress(log_every_s=0.05, begun_s=0.01)
    with progress.phase("write texts", 40):
        progress.advance(10)
        time.sleep(0.2)
    lines = capfd.readouterr().err.splitlines()
    assert any(
        re.fullmatch(r"write texts +\d+\.\d s so far, 10 of 40, about \d+ s left", line) for line in lines
    )


def test_a_phase_that_does_not_advance_still_prints_lines(capfd: pytest.CaptureFixture[str]) -> None:
    progress = RichProgress(log_every_s=0.05, begun_s=0.01)
    with progress.phase("store target", 1):
        time.sleep(0.2)
    lines = capfd.readouterr().err.splitlines()
    assert any(re.fullmatch(r"store target +\d+\.\d s so far, 0 of 1", line) for line in lines)


def test_a_phase_that_is_broken_off_shows_nothing_more(capfd: pytest.CaptureFixture[str]) -> None:
    progress = RichProgress(log_every_s=0.05, begun_s=0.01)
    with pytest.raises(KeyboardInterrupt), progress.phase("draft trees", 5):
        raise KeyboardInterrupt
    capfd.readouterr()
    time.sleep(0.2)
    progress.advance()
    assert capfd.readouterr().err == ""


def test_a_note_is_printed_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    RichProgress().note(
        "calibration on [64] texts takes about 12 s of a budget of 120 s" + 10 * " and more"
    )
    assert (
        capfd.readouterr().err
        == "calibration on [64] texts takes about 12 s of a budget of 120 s" + 10 * " and more" + "\n"
    )
