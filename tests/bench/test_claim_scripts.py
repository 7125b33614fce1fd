"""Scripts of claims: a rehearsal replaces no result, standard output ends in the JSON document, and a
result has a file of its own and shows what was decoded.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import (
    architectures,
    claim_exact,
    claim_memory,
    claim_peers,
    claim_serving,
    claim_single_stream,
    claim_start,
)
from bench.lib.claim import Claim, Option, int_from
from bench.lib.workloads import WORKLOADS
from yggdrasil.errors import UsageError

FOUND: dict[str, dict[str, Any]] = {
    "exact": {"comparisons": []},
    "memory": {
        "num_graphs": 13,
        "resident_bytes": 3,
        "weight_bytes": 2,
        "cache_bytes": 1,
        "ratio_over_weights_after_caches": 1.0,
    },
    "start": {
        "first_wall_ms": 5.0,
        "later_startup_ms": 4.0,
        "later_ttft_ms": 3.0,
        "tok_per_s": 2.0,
        "plain_tok_per_s": 1.0,
        "later_compilations": 0,
    },
}


@pytest.mark.parametrize(
    "claim", (claim_exact.CLAIM, claim_memory.CLAIM, claim_start.CLAIM), ids=lambda claim: claim.name
)
@pytest.mark.parametrize("quick", (True, False))
def test_a_rehearsal_replaces_no_result(
    claim: Claim,
    quick: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results"
    home = tmp_path / "home"
    monkeypatch.setenv("YGG_BENCH_RESULTS", str(results))
    monkeypatch.setenv("YGG_HOME", str(home))
    found = FOUND[claim.name]
    fake = replace(claim, measure=lambda options, log: {"quick": options.quick, **found})
    result = fake.main(["--json", *(["--quick"] if quick else [])])
    written = list((home / "bench_results" if quick else results).iterdir())
    assert len(written) == 1
    assert not (results if quick else home / "bench_results").exists()
    assert json.loads(capsys.readouterr().out) == json.loads(written[0].read_text()) == result
    assert list(result) == ["claim", "question", "arguments", "settings", "environment", "quick", *found]
    assert (result["claim"], result["quick"], result["settings"]["rehearsal"]) == (claim.name, quick, quick)


def claim_of(measure: Any, **fields: Any) -> Claim:
    """A claim that measures nothing of this machine."""
    return Claim(name="made_up", doc="Is it?\n\nYes.", measure=measure, table=str, devices=(), **fields)


def test_a_result_names_its_arguments_and_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_BENCH_RESULTS", str(tmp_path))
    options = (
        Option("--rounds", "turns", quick=1, default=3),
        Option("--earlier", "a checkout", metavar="PATH"),
        Option("--home", "a folder", metavar="PATH"),
    )
    claim = claim_of(lambda options, log: {}, options=options)
    given = ["--rounds", "5", "--earlier", str(tmp_path / "before"), f"--home={tmp_path / 'kept'}"]
    shown = ["--rounds", "5", "--earlier", "before", "--home=kept"]
    assert claim.main(given)["arguments"] == shown
    monkeypatch.setattr(sys, "argv", ["bench.claim_made_up", *given])
    assert claim.main()["arguments"] == shown


def test_an_error_that_a_user_can_fix_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(options: Any, log: Any) -> dict[str, Any]:
        raise UsageError("no draft", "give one")

    with pytest.raises(SystemExit) as ended:
        claim_of(measure).main([])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "error: no draft: give one\n")


def test_a_rehearsal_has_its_own_values_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        Option("--rounds", "turns", quick=1, type=int_from(1), default=3),
        Option("--some-text", "a text", default="a"),
    )
    claim = claim_of(lambda options, log: {}, options=options)
    assert vars(claim.parse([])) == {"json": False, "quick": False, "rounds": 3, "some_text": "a"}
    quick = claim.parse(["--quick", "--rounds", "2", "--some-text", "b"])
    assert (quick.rounds, quick.some_text) == (1, "b")
    with pytest.raises(SystemExit):
        claim.parse(["--rounds", "0"])
    assert "0 is not allowed; it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("claim", "arguments", "variant"),
    (
        (claim_memory.CLAIM, [], ["tinystories"]),
        (claim_peers.CLAIM, [], []),
        (claim_peers.CLAIM, ["--draft", "small", "--text", "code"], ["small", "code"]),
        (claim_peers.CLAIM, ["--weights", "int8", "int4"], ["int8", "int4"]),
        (claim_serving.CLAIM, [], []),
        (claim_serving.CLAIM, ["--part", "trace", "--clock", "profile"], ["trace", "profile"]),
        (claim_single_stream.CLAIM, [], []),
        (claim_single_stream.CLAIM, ["--temperature", "0.8"], ["temperature_0.8"]),
    ),
)
def test_results_of_another_kind_have_names_of_their_own(
    claim: Claim, arguments: list[str], variant: list[str]
) -> None:
    assert list(claim.variant(claim.parse(arguments))) == variant


def test_a_claim_is_started_by_the_name_of_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    for claim, name in ((architectures.CLAIM, "architectures"), (claim_start.CLAIM, "claim_start")):
        with pytest.raises(SystemExit):
            claim.parse(["--help"])
        assert f"usage: bench.{name} " in capsys.readouterr().out


def test_the_result_of_exactness_names_which_prompts_were_decoded() -> None:
    pair: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: list(range(1000))))
    prompts = claim_exact.prompts_of(pair, 7)
    settings = claim_exact.settings_of(argparse.Namespace(tokens=16, quick=True), prompts)
    assert list(settings["prompt_lens_by_text"]) == list(WORKLOADS) == ["stories", "wiki", "code"]
    assert settings["prompt_lens_by_text"] == {"stories": [1, 112, 73], "wiki": [38, 149], "code": [75, 36]}
    assert settings["seeds"] == [0, 6]
    assert (settings["pair"], settings["tokens"], settings["rehearsal"]) == ("tinystories", 16, True)
