"""Scripts of claims: a rehearsal replaces no result, standard output ends in the JSON document, and a
result shows what was decoded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench import claim_exact, claim_memory, claim_start
from bench.lib.workloads import WORKLOADS

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
    "script", (claim_exact, claim_memory, claim_start), ids=lambda script: script.CLAIM
)
@pytest.mark.parametrize("quick", (True, False))
def test_a_rehearsal_replaces_no_result(
    script: ModuleType,
    quick: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results"
    home = tmp_path / "home"
    monkeypatch.setenv("YGG_BENCH_RESULTS", str(results))
    monkeypatch.setenv("YGG_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["claim", "--json", *(["--quick"] if quick else [])])
    monkeypatch.setattr(
        script,
        "measure",
        lambda options, *log: {"claim": script.CLAIM, "quick": options.quick, **FOUND[script.CLAIM]},
    )
    script.main()
    written = list((home / "bench_results" if quick else results).iterdir())
    assert len(written) == 1
    assert not (results if quick else home / "bench_results").exists()
    out = capsys.readouterr().out
    assert (
        json.loads(out)
        == json.loads(written[0].read_text())
        == {"claim": script.CLAIM, "quick": quick, **FOUND[script.CLAIM]}
    )


def test_the_result_of_exactness_says_which_prompts_were_decoded() -> None:
    pair: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: list(range(1000))))
    prompts = claim_exact.prompts_of(pair, 7)
    settings = claim_exact.settings_of(argparse.Namespace(tokens=16, quick=True), prompts)
    assert list(settings["prompt_lens_by_text"]) == list(WORKLOADS) == ["stories", "wiki", "code"]
    assert settings["prompt_lens_by_text"] == {"stories": [1, 112, 73], "wiki": [38, 149], "code": [75, 36]}
    assert settings["seeds"] == [0, 6]
    assert (settings["pair"], settings["tokens"], settings["rehearsal"]) == ("tinystories", 16, True)
