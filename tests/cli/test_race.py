"""`ygg race`: two runs of one prompt, their figures, and the replay on a terminal."""

from __future__ import annotations

import re

import pytest
from pseudo_terminal import terminal
from rich.console import Console

from yggdrasil.api import Pair
from yggdrasil.cli import main
from yggdrasil.config import GenerateConfig
from yggdrasil.report.race import Race, record_race
from yggdrasil.report.run import Chunk

PROMPT = "Once upon a time"
WORDS = ("race", PROMPT, "--pair", "tiny", "-n", "16", "--ignore-eos")
FIGURES = (
    r"plain +16 tokens in \d+ ms, \d+ tokens/s, 1\.00 tokens a pass\n"
    r"speculation +16 tokens in \d+ ms, \d+ tokens/s, \d\.\d\d tokens a pass\n"
    r"same text, \d+\.\d times as fast, measured just now\n"
)

pytestmark = pytest.mark.usefixtures("tiny_bundle")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def race(pair: Pair) -> Race:
    return record_race(pair, pair.tokens(PROMPT), GenerateConfig(max_new_tokens=16, ignore_eos=True))


def test_off_a_terminal_there_are_the_last_lines_alone(capsys: Capture) -> None:
    assert main(WORDS) == 0
    assert re.fullmatch(FIGURES, capsys.readouterr().out)


def test_a_terminal_shows_both_texts_as_they_came(pair: Pair) -> None:
    text = pair.generate(PROMPT, max_new_tokens=16, ignore_eos=True).text
    with terminal(*WORDS, "--slow", "100") as shown:
        assert shown.wait_for_end() == 0
    assert re.search(FIGURES, shown.text)
    last = shown.text.rsplit("plain, ", 1)[1]
    assert last.count(text.split()[-1]) >= 2
    assert shown.text.count("plain, ") > 2  # frames


LIVE = re.compile(r"plain, [1-9]\d* ms +speculation, 0 ms")  # in a replay both clocks go on together


@pytest.mark.parametrize("after_s", (0, 60))
def test_a_recording_that_takes_long_is_shown_as_it_comes(after_s: float) -> None:
    first = f"from yggdrasil.report import race; race.FRAME_S = 0; race.LIVE_AFTER_S = {after_s}"
    with terminal(*WORDS, "--slow", "1", first=first) as shown:
        assert shown.wait_for_end() == 0
    assert bool(LIVE.search(shown.text)) == (after_s == 0)
    assert re.search(FIGURES, shown.text)


def test_who_watches_a_recording_sees_every_step_of_both_runs(pair: Pair) -> None:
    config = GenerateConfig(max_new_tokens=16, ignore_eos=True)
    seen: list[tuple[int, int]] = []
    race = record_race(
        pair,
        pair.tokens(PROMPT),
        config,
        lambda race: seen.append((race.plain.num_tokens, race.speculative.num_tokens)),
    )
    assert seen[:2] == [(1, 0), (2, 0)]
    assert seen[-1] == (16, 16)
    assert len(seen) == len(race.plain.results) + len(race.speculative.results) + 2  # and both ends


def test_both_runs_begin_from_nothing_and_write_the_same(race: Race, pair: Pair) -> None:
    assert race.plain.text == race.speculative.text
    assert race.plain.kept_tokens == race.speculative.kept_tokens == 0
    assert race.plain.config.plain
    assert race.plain.aal == 1 < race.speculative.aal
    sampled = GenerateConfig.of({"max_new_tokens": 16, "temperature": 0.9, "seed": 4})
    assert "same text, " in record_race(pair, pair.tokens(PROMPT), sampled).summary()


def test_the_ratio_is_that_of_the_clocks(race: Race) -> None:
    race.plain.total_ms = 300.0
    race.speculative.total_ms = 120.0
    plain, speculation, ratio = race.summary().splitlines()
    assert "16 tokens in 300 ms, 53 tokens/s, " in plain
    assert "16 tokens in 120 ms, 133 tokens/s, " in speculation
    assert ratio == "same text, 2.5 times as fast, measured just now"
    assert race.default_slow == pytest.approx(8000 / 300)
    race.plain.total_ms = 60_000.0
    assert race.default_slow == 1


def test_texts_that_differ_are_not_the_same(race: Race) -> None:
    common = race.plain.text[:5]
    race.plain._stream._released = [common, "\x00"]
    assert f"the texts differ after {len(common)} characters, " in race.summary()


def test_a_frame_has_what_came_until_then(race: Race) -> None:
    screen = Console(force_terminal=True, color_system="standard", width=80, height=20)
    race.plain.chunks = [Chunk(10.0, " one", 0), Chunk(20.0, " two", 0), Chunk(30.0, " three", 0)]
    race.speculative.chunks = [Chunk(12.0, " one two", 1), Chunk(15.0, " three", 0)]
    race.plain.total_ms = 30.0
    race.speculative.total_ms = 15.0
    with screen.capture() as captured:
        screen.print(race.frame(screen, "Zero", 13.0))
    shown = captured.get()
    assert "plain, 13 ms" in shown
    assert "\x1b[32m one two\x1b[0m" in shown  # accepted
    assert "three" not in shown
    with screen.capture() as captured:
        screen.print(race.frame(screen, "Zero", 25.0))
    assert "\x1b[1;32mspeculation, 15 ms" in captured.get()  # its clock stands


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--slow", "0"), "--slow: 0.0 is not allowed; it must be a finite number above 0"),
        (("--slow", "nan"), "--slow: nan"),
        (("--temperature", "-1"), "--temperature: -1.0"),
        (("-n", "9999"), "at most "),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    words: tuple[str, ...], complaint: str, capsys: Capture
) -> None:
    assert main(["race", PROMPT, "--pair", "tiny", *words]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert len(err.splitlines()) == 1
    assert main(["race", "--pair", "tiny"]) == 2
    assert "a prompt is missing: ygg race " in capsys.readouterr().err
