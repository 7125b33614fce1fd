"""The benchmarks' texts: every workload has its three splits, and no text or source stands on two sides."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from bench.lib.workloads import WORKLOADS, Workload
from bench.make_data import MAX_CHARS, MIN_WORDS, SPLITS, code_texts, pick, side, wiki_texts

PARAGRAPH = "word " * 30 + "12 @.@ 5 @-@ metre ( so ) , " + "more " * 40 + ". An <unk> sentence . "
WIKI = [" = Lobster = ", "", f" {PARAGRAPH}", " = = Diet = = ", " too short . ", " <unk> " + "word " * 80]


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=str)
def test_the_splits_of_a_workload_are_disjoint(workload: Workload) -> None:
    splits = {
        "test": workload.test_texts,
        "calibration": workload.calibration_texts,
        "validation": workload.validation_texts,
    }
    assert all(len(texts) >= 20 for texts in splits.values()), {
        name: len(texts) for name, texts in splits.items()
    }
    for (one, texts), (other, others) in combinations(splits.items(), 2):
        beginnings = {text[:80] for text in texts}
        assert not beginnings & {text[:80] for text in others}, f"{one} and {other} share a text"


@pytest.mark.parametrize("workload", ("wiki", "code"))
def test_no_article_and_no_module_is_on_two_sides(workload: str) -> None:
    folder = Path(__file__).parents[2] / "bench" / "data"
    files = {split: (folder / f"{split}_{workload}.jsonl").read_text(encoding="utf-8") for split in SPLITS}
    sources = {
        split: {json.loads(line)["source"] for line in file.split("\n") if line}
        for split, file in files.items()
    }
    for one, other in combinations(SPLITS, 2):
        assert not sources[one] & sources[other]


def test_wiki_paragraphs_are_joined_long_and_without_unknown_words() -> None:
    (text,) = wiki_texts(WIKI)
    assert text.source == "Lobster"
    assert "12.5-metre (so), more" in text.text
    assert len(text.text.split()) >= MIN_WORDS
    assert len(text.text) <= MAX_CHARS
    assert "unk" not in text.text


def test_code_is_whole_lines_of_library_functions(tmp_path: Path) -> None:
    body = "\n".join(f"    value_{line} = {line}" for line in range(80))
    (tmp_path / "json.py").write_text(f"def long():\n{body}\n")
    (tmp_path / "not_a_library_module.py").write_text(f"def long():\n{body}\n")
    (text,) = code_texts(tmp_path)
    assert text.source == "json"
    assert text.text.splitlines()[-1] in body.splitlines()


def test_the_same_source_is_always_on_the_same_side_and_in_the_same_order() -> None:
    sides = {
        name: side(name, SPLITS)
        for name in ("ast", "json", "typing", "re", "os", "csv", "xml", "enum", "cgi", "glob")
    }
    assert set(sides.values()) == set(SPLITS)
    texts = list(wiki_texts(WIKI))
    assert pick(texts * 3) == pick(reversed(texts * 3))
