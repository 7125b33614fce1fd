"""README and benchmarks' README say what the command lines do, and every result that is linked is there."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from yggdrasil.cli.main import _parser

ROOT = Path(__file__).parents[2]
README, BENCH_README = ROOT / "README.md", ROOT / "bench" / "README.md"
SCRIPTS = sorted(script.stem for script in (ROOT / "bench").glob("claim_*.py"))


def commands(page: Path, start: str) -> list[str]:
    """Every command of a page's code blocks that begins with `start`, continued lines joined, prompts and other commands of the line left out."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console|text)?\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|(?!\|)|;", line)]
    return [part for part in parts if part.startswith(start)]


def verb_lines() -> list[list[str]]:
    """What `ygg` or, under torchrun, `-m yggdrasil` is given."""
    shared = [command.partition(" -m yggdrasil ")[2] for command in commands(README, "torchrun ")]
    return [shlex.split(line, comments=True) for line in [*(command.removeprefix("ygg ") for command in commands(README, "ygg ")), *shared]]


def bench_lines() -> list[list[str]]:
    """Module and options of every `python -m bench...`."""
    return [shlex.split(command, comments=True)[2:] for page in (README, BENCH_README) for command in commands(page, "python -m bench.")]


def parse_of(module: str, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    """Run a script's `main` as far as its command line is read."""

    class ReadError(Exception):
        """The command line was read."""

    def stop(*args: object) -> None:
        raise ReadError

    real = importlib.import_module("argparse").ArgumentParser.parse_args
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", lambda self, *args: (real(self, *args), stop()))
    monkeypatch.setattr(sys, "argv", [module, *options])
    loaded = importlib.import_module(module)
    main = loaded.CLAIM.main if hasattr(getattr(loaded, "CLAIM", None), "main") else loaded.main
    with pytest.raises(ReadError):
        main()


def test_the_readme_shows_every_verb() -> None:
    assert {line[0] for line in verb_lines()} == {"generate", "compile", "show", "serve"}


@pytest.mark.parametrize("line", verb_lines(), ids=" ".join)
def test_commands_of_the_readme_parse(line: list[str]) -> None:
    line = line[: line.index(">")] if ">" in line else line
    assert _parser().parse_args(line).verb == line[0]


@pytest.mark.parametrize("line", bench_lines(), ids=" ".join)
def test_scripts_that_are_shown_exist_and_take_these_options(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse_of(line[0], monkeypatch, line[1:])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_claim_can_be_rehearsed_and_print_json_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_of(f"bench.{name}", monkeypatch, ["--quick", "--json"])


def test_every_claim_is_in_the_table_of_claims() -> None:
    assert sorted(re.findall(r"^\| `(claim_\w+)`", BENCH_README.read_text(), flags=re.MULTILINE)) == SCRIPTS


def test_an_option_that_a_script_does_not_have_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse_of("bench.claim_start", monkeypatch, ["--no-such-option"])


@pytest.mark.parametrize("page", (README, BENCH_README), ids=("README", "bench/README"))
def test_every_linked_file_exists(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text())]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_every_result_of_the_table_of_claims_exists() -> None:
    named = re.findall(r"`(results/[\w.]+\.json)`", BENCH_README.read_text())
    assert len(named) > 15
    assert [name for name in named if not (BENCH_README.parent / name).exists()] == []


def test_every_linked_result_stands_beside_its_date() -> None:
    text = README.read_text()
    dates = dict(re.findall(r"\]\((bench/results/[\w.-]+\.json)\),\s(\d{4}-\d{2}-\d{2})", text))
    assert set(re.findall(r"\]\((bench/results/[\w.-]+\.json)\)", text)) == set(dates), "`([result](FILE), DATE)`"
    assert dates == {name: json.loads((ROOT / name).read_text())["environment"]["date"][:10] for name in dates}


def test_every_linked_line_begins_a_definition() -> None:
    links = re.findall(r"`[\w.]*?(\w+)`\]\(([\w/.]+)#L(\d+)\)", README.read_text())
    assert links
    assert [link for link in links if f"def {link[0]}(" not in (ROOT / link[1]).read_text().splitlines()[int(link[2]) - 1]] == []
