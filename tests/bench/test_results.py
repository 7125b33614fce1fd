"""RESULTS.md agrees with the committed results, and each state of a claim shows in its cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import results
from bench.lib import sources
from bench.lib.headlines import CLAIMS, Claimed, Headline
from bench.results import cell, code_of, kind_of, page


def environment(**fields: Any) -> dict[str, Any]:
    known = {
        "date": "2026-11-25T10:00:00",
        "commit": "0123456789ab-dirty",
        "flags": "avx2 avx512f",
        "gpu": None,
    }
    return {**known, "code": sources.code_digests(), **fields}


def cell_of(headline: Headline, *, serves: bool = False, **fields: Any) -> str:
    result = {"environment": environment(**fields)}
    claimed = Claimed("a number", lambda result: headline, serves=serves)
    return cell("made_up.json", result, claimed, sources.code_digests())


def test_the_page_is_generated_from_the_results() -> None:
    assert results.main(["--check"]) == 0


@pytest.mark.parametrize(("name", "result"), results.load_results().items())
def test_an_interval_contains_its_value(name: str, result: dict[str, Any]) -> None:
    headline = CLAIMS[result["claim"]].read(result)
    if headline.interval is not None:
        low, high = headline.interval
        assert low <= headline.value <= high


def test_a_changed_result_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results.load_results()
    found["guard.json"]["environment"]["date"] = "2001-01-01"
    monkeypatch.setattr(results, "load_results", lambda: found)
    assert results.main(["--check"]) == 1
    assert "run `python -m bench.results`" in capsys.readouterr().err


def test_a_change_of_the_code_is_noted_and_leaves_the_page_valid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "code_digests", lambda: {"decode": "0" * 12, "serve": "1" * 12})
    assert results.main(["--check"]) == 0
    assert "the code is newer" in capsys.readouterr().err


def test_a_mark_that_does_not_fit_the_named_code_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = results.load_results()["guard.json"]["environment"]["code"]
    text = page(results.load_results(), code)
    other = text.replace(code["decode"], "0" * 12)
    unmarked = text.replace(", stale", "", 1)
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    for written, code_returned in ((text, 0), (other, 1), (unmarked, 1), ("", 1)):
        results.PAGE.write_text(written)
        assert results.main(["--check"]) == code_returned


def test_a_page_names_the_code_that_it_compares_with() -> None:
    code = sources.code_digests()
    assert code_of(page(results.load_results(), code)) == code


def test_every_result_is_in_the_page_once() -> None:
    text = page(results.load_results(), sources.code_digests())
    assert {name: text.count(f"(results/{name})") for name in results.load_results()} == dict.fromkeys(
        results.load_results(), 1
    )


def test_a_cell_shows_value_interval_wanted_verdict_date_and_commit() -> None:
    held = Headline(5.071, "2.2", held=True, interval=(4.24, 5.52))
    assert cell_of(held) == (
        "[5.07 (4.24-5.52), 2.2 wanted, held](results/made_up.json) 2026-11-25 0123456"
    )


def test_missed_goals_are_counted() -> None:
    assert "missed 2 of 5]" in cell_of(Headline(1.0, "2", held=False, missed=(2, 5)))


@pytest.mark.parametrize("part", ("decode", "serve"))
def test_a_result_of_other_code_is_stale(part: str) -> None:
    older = {**sources.code_digests(), part: "other"}
    headline = Headline(1.0, "", held=True)
    assert cell_of(headline, serves=True, code=older).endswith(", stale")
    assert cell_of(headline, code=older).endswith(", stale") == (part == "decode")


def test_a_result_without_a_digest_is_stale() -> None:
    assert cell_of(Headline(1.0, "", held=True), code={}).endswith(", stale")


@pytest.mark.parametrize(
    ("fields", "kind"),
    (
        ({"flags": "avx2 avx512f amx_bf16"}, "AMX"),
        ({"flags": "avx2 avx512f"}, "AVX-512"),
        ({"flags": "avx2"}, "AVX2"),
        ({"gpu": "a device"}, "GPU"),
    ),
)
def test_a_machine_has_a_column_by_its_kind(fields: dict[str, Any], kind: str) -> None:
    assert kind_of({"environment": environment(**fields)}) == kind


def test_comments_and_docstrings_do_not_make_a_result_stale(tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text('def double(x):\n    """Twice."""\n    return 2 * x  # two\n')
    before = sources.normalised(source)
    source.write_text("def double(x):\n\n    return (2 * x)\n")
    assert sources.normalised(source) == before
    source.write_text("def double(x):\n    return 3 * x\n")
    assert sources.normalised(source) != before


def test_comments_of_cpp_do_not_make_a_result_stale(tmp_path: Path) -> None:
    source = tmp_path / "code.cpp"
    source.write_text("int two() { return 2; }  // two\n")
    before = sources.normalised(source)
    source.write_text("/* two */\nint two()\n{ return 2; }\n")
    assert sources.normalised(source) == before
    source.write_text("int two() { return 3; }\n")
    assert sources.normalised(source) != before


def test_every_claim_script_has_a_headline() -> None:
    scripts = {path.stem.removeprefix("claim_") for path in results.FOLDER.glob("claim_*.py")}
    assert scripts - set(CLAIMS) == {"kernels", "exact_cost"}, (
        "those two need a GPU; gpu.sh has its own folder"
    )
