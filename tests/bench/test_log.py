"""The log keeps its form: four lines an idea, few numbers, and an index of all ideas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MONTHS = sorted((BENCH / "log").glob("*.md"))
IDEAS = [
    (month.stem, heading, body)
    for month in MONTHS
    for heading, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", month.read_text(), re.MULTILINE)
]
LINES = ["Question", "Predicted", "Outcome", "Decision"]
VERDICTS = ("kept", "dropped", "open")
SYMBOLS = re.compile(r"`[^`]*`|T_?\w*\(\d+\)|T\^\S+|bf16|1e-\d|W = 1|Eq\. \d|AVX-512|\d+th")
MOST_NUMBERS = 5


def verdict(body: str) -> str:
    found = re.search(r"^Decision: (\w+)", body, re.MULTILINE)
    assert found is not None
    return found[1].lower()


@pytest.mark.parametrize(("heading", "body"), [idea[1:] for idea in IDEAS], ids=[idea[1] for idea in IDEAS])
def test_an_idea_has_four_lines_a_verdict_and_few_numbers(heading: str, body: str) -> None:
    assert [line.partition(":")[0] for line in body.strip().splitlines()] == LINES
    assert verdict(body) in VERDICTS
    assert len(re.findall(r"\d+(?:[.,]\d+)*", SYMBOLS.sub("", body))) <= MOST_NUMBERS


def test_the_index_has_every_idea_with_its_verdict() -> None:
    index = re.findall(
        r"^\| (\S+) \| \[(.*)\]\(log/(.*)\.md#\S+\) \| (\w+) \|$",
        (BENCH / "LOG.md").read_text(),
        re.MULTILINE,
    )
    expected = []
    for month, heading, body in IDEAS:
        date, _, title = heading.partition(" ")
        expected.append((date, title, month, verdict(body)))
    assert index == expected
