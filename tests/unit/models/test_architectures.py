"""No architecture is accepted and computed wrongly: a quick run of `bench.architectures`, its results."""

from __future__ import annotations

import json

import pytest

from bench import architectures
from bench.architectures import EQUAL, NOT_BUILT, QUICK, REFUSED, WRONG, judge
from bench.lib.harness import RESULTS

REFUSALS = {
    "gemma2": "soft-capped attention scores",
    "diffllama": "layer 0 asks for attention 2 times",
    "bert": "computes wrongly",
    "lfm2": "convolution over tokens",
    "bloom": "whose attention cannot be replaced",
}


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_is_equal_to_transformers_or_refused(name: str, kernels: None) -> None:
    architectures.register_attention()
    row = judge(*architectures.architectures()[name])
    assert (row.model_type, row.outcome) == (name, REFUSED if name in REFUSALS else EQUAL), row.detail
    assert REFUSALS.get(name, "") in row.detail


def test_an_accepted_architecture_that_differs_is_reported_as_wrong(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # accept everything
    monkeypatch.setattr(architectures, "check_forward", lambda *everything: None)
    architectures.register_attention()
    for name in ("diffllama", "bert"):
        assert judge(*architectures.architectures()[name]).outcome == WRONG


def test_the_committed_results_have_no_wrong_architecture_and_right_counts() -> None:
    table = json.loads((RESULTS / "architectures.json").read_text())
    outcomes = [row["outcome"] for row in table["architectures"]]
    assert set(outcomes) <= {EQUAL, REFUSED, NOT_BUILT}
    assert {outcome: outcomes.count(outcome) for outcome in set(outcomes)} == table["counts"]
    assert len(outcomes) > 180
    assert {row["model_type"] for row in table["architectures"]} >= set(QUICK)
