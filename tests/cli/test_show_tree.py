"""`ygg show tree` and what `ygg generate` reports of the guard, on a compiled pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from yggdrasil.cli import main

PROMPT = "Once upon a time"
Capture = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("tiny_bundle")
def test_html_writes_one_page_with_every_step(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "trees.html"
    assert main(["show", "tree", PROMPT, "--pair", "tiny", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(page)
    text = page.read_text()
    first_step = out.splitlines()[0].replace(" (*)", "").replace("'", "&#x27;")
    assert f"1. {first_step}" in text
    assert 'class="pruned"' in text


@pytest.mark.usefixtures("tiny_bundle")
def test_the_first_tree_is_shown_after_a_prompt_that_ends_without_one(
    capsys: Capture, tmp_path: Path
) -> None:
    page = tmp_path / "trees.html"
    long_prompt = "Once upon a time there was a big red ball in the park near the house"
    assert main(["show", "tree", long_prompt, "--pair", "tiny", "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("W=")
    assert "<h2>1. plain" in page.read_text()


@pytest.mark.usefixtures("tiny_bundle")
def test_temperature_and_seed_choose_another_text(capsys: Capture) -> None:
    outs = []
    for options in ((), ("--temperature", "1", "--seed", "3"), ("--temperature", "1", "--seed", "3")):
        assert main(["show", "tree", PROMPT, "--pair", "tiny", *options]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[1] == outs[2]
    assert outs[0] != outs[1]


@pytest.mark.usefixtures("tiny_bundle")
def test_show_step_records_sampled_steps(capsys: Capture, tmp_path: Path) -> None:
    options = ["--temperature", "0.8", "--seed", "3", "--out", str(tmp_path)]
    assert main(["show", "step", PROMPT, "--pair", "tiny", *options]) == 0
    assert "[verify " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["profile", "--html", "x.html"], "ygg show tree --html x.html"),
        (["tree", "--temperature", "-1"], "temperature"),
        (["tree", PROMPT, "--pair", "tiny", "--html", "nowhere/x.html"], "a file that can be written"),
    ],
)
@pytest.mark.usefixtures("tiny_bundle")
def test_options_that_cannot_be_are_refused_in_one_line(
    options: list[str], words: str, capfd: Capture
) -> None:
    assert main(["show", *options]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.usefixtures("tiny_bundle")
@pytest.mark.parametrize(("option", "guard"), ((None, True), ("--no-guard", False), ("--plain", False)))
def test_json_reports_whether_a_guard_watched(option: str | None, guard: bool, capsys: Capture) -> None:
    options = [] if option is None else [option]
    assert main(["generate", PROMPT, "--pair", "tiny", "-n", "8", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["guard"] is guard


@pytest.mark.usefixtures("tiny_bundle")
def test_statistics_say_that_there_was_no_guard(capsys: Capture) -> None:
    for options, is_unguarded in (([], False), (["--no-guard"], True)):
        assert main(["generate", PROMPT, "--pair", "tiny", "-n", "8", "--stats", *options]) == 0
        assert (", without a guard" in capsys.readouterr().err) == is_unguarded
