"""The README says what the command line does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from yggdrasil.cli.main import _parser

README = Path(__file__).parents[2] / "README.md"


def commands() -> list[str]:
    """Every `ygg` command of the README's code blocks, continued lines joined, prompts and other commands of the line left out."""
    if not README.exists():
        return []
    blocks = re.findall(r"^```(?:bash|sh|shell|console|text)?\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|(?!\|)|;", line)]
    return [part for part in parts if part.startswith("ygg ")]


@pytest.mark.skipif(not README.exists(), reason="no README yet")
def test_the_readme_shows_generate_and_compile() -> None:
    assert {command.split()[1] for command in commands()} >= {"generate", "compile"}


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_parse(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    assert _parser().parse_args(words).verb == words[0]
