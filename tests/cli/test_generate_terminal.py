"""`ygg generate` for a person: the dimmed prompt, the last line, and trees that grow next to the text."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace

import pytest
from pseudo_terminal import terminal
from rich.console import Console, RenderableType

from yggdrasil.api import Pair
from yggdrasil.cli import main
from yggdrasil.report import live
from yggdrasil.report import run as run_module
from yggdrasil.report.run import Run
from yggdrasil.state import Shape

PROMPT = "Once upon a time"
WORDS = ("generate", PROMPT, "--pair", "tiny", "-n", "12")
DIM = "\x1b[2m"

pytestmark = pytest.mark.usefixtures("tiny_bundle")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has nothing else to do, whatever else it does."""
    monkeypatch.setattr(Run, "slowdown", 1.0)


def test_a_terminal_shows_the_prompt_dimmed_and_ends_with_the_speed(pair: Pair) -> None:
    text = pair.generate(PROMPT, max_new_tokens=12).text
    with terminal(*WORDS) as shown:
        assert shown.wait_for_end() == 0
    first, last, *_ = shown.text.split("\n")  # a busy machine is noted after them
    assert first == PROMPT + text
    assert shown.screen.startswith(f"{DIM}{PROMPT}\x1b[0m")
    assert re.fullmatch(r"12 tokens, \d+ tokens/s, \d\.\d\d tokens a pass", last)


def test_quiet_writes_the_text_alone_on_a_terminal(pair: Pair) -> None:
    text = pair.generate(PROMPT, max_new_tokens=12).text
    with terminal(*WORDS, "--quiet") as shown:
        assert shown.wait_for_end() == 0
    assert shown.text.split("\n")[0] == text
    assert DIM not in shown.screen


def test_live_draws_trees_and_leaves_the_text(pair: Pair) -> None:
    text = pair.generate(PROMPT, max_new_tokens=12).text
    with terminal(*WORDS, "--live") as shown:
        assert shown.wait_for_end() == 0
    assert "├── " in shown.text or "└── " in shown.text
    assert "verified, " in shown.text
    after = shown.text.rsplit(PROMPT, 1)[1]
    assert after.startswith(f"{text}\n")
    assert "└" not in after


def test_live_off_a_terminal_is_the_text_alone(capsys: Capture, quiet: None, pair: Pair) -> None:
    assert main([*WORDS, "--live"]) == 0
    assert capsys.readouterr() == (f"{pair.generate(PROMPT, max_new_tokens=12).text}\n", "")


@pytest.mark.parametrize("other", ("--json", "--show-tree"))
def test_live_excludes_other_forms_of_output(other: str, capsys: Capture) -> None:
    assert main([*WORDS, "--live", other]) == 2
    assert (
        f"--live: True is not allowed; it must be left out together with {other}" in capsys.readouterr().err
    )


def test_frames_grow_by_depth_and_end_with_the_decision(pair: Pair) -> None:
    run = pair.stream(PROMPT, max_new_tokens=8, shape=Shape(width=2, depth=3, verify=4)).complete()
    result = run.results[0]
    depth = int(result.tree.depth_N.max())
    frames = [_printed(frame) for frame in live.step_frames(result, pair.tokenizer)]
    assert len(frames) == depth + 1
    num_lines = [frame.count("\n") for frame in frames]
    assert num_lines == sorted(num_lines)
    for node, token in enumerate(result.tree.token_N.tolist()):
        label = pair.tokenizer.token_text(token)
        style = "\x1b[1;32m" if node in result.path else DIM
        assert f"{style}{label}" in frames[-1]
        assert label in frames[-2]
        assert f"{style}{label}" not in frames[-2]
    assert f"\x1b[1;36m{pair.tokenizer.token_text(result.tokens[-1])}" in frames[-1]


def _printed(frame: RenderableType) -> str:
    """A frame in colours."""
    screen = Console(force_terminal=True, color_system="standard", width=100)
    with screen.capture() as captured:
        screen.print(frame)
    return captured.get()


def test_time_in_which_a_reader_waits_is_not_the_run_s(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + waited_s)
    monkeypatch.setattr(run_module, "time", clock)
    run = pair.stream(PROMPT, max_new_tokens=12, ignore_eos=True)
    for _ in run:
        waited_s += 1e6
    assert len(run.results) > 1
    assert run.total_ms < 1e6


def test_chat_answers_one_message_by_the_template(capsys: Capture, pair: Pair) -> None:
    question = "Who are you?"
    words = ("generate", question, "--pair", "tiny", "-n", "12", "--chat", "--json")
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    expected = pair.chat(question, max_new_tokens=12)
    assert (report["text"], report["prompt_tokens"]) == (expected.text, expected.prompt_tokens)
    assert report["prompt_tokens"] > len(pair.tokenizer.encode(question))
