"""The claim about rounded weights: its goals, its table, and what it reads of this process's memory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import claim_quantised
from bench.claim_quantised import (
    CLAIM,
    goals_of,
    measure_decoding,
    measure_forwards,
    perplexity_of,
    resident_bytes,
    table,
    text_losses,
)
from bench.lib.harness import Arm, Generation, TextMismatchError
from yggdrasil.bundle import Bundle
from yggdrasil.models.packing import pack_chain_
from yggdrasil.pair import LoadedPair

MAPS = """\
7f00-7f10 r--p 00000000 08:01 11 /store/pair/target/weights.safetensors
Size:                 40 kB
Rss:                  12 kB
VmFlags: rd mr mw me
7f10-7f20 r--p 00010000 08:01 12 /store/pair/draft/weights.safetensors
Rss:                 100 kB
7f20-7f30 r--p 00010000 08:01 11 /store/pair/target/weights.safetensors
Rss:                   4 kB
7f28-7f38 r--p 00000000 08:01 11 /store/pair/target/weights.safetensors
Rss:                   9 kB
7f30-7f40 rw-p 00000000 00:00 0
Rss:                   8 kB
"""


def found(ratio: float, narrow_ms: float, resident: int) -> dict[str, Any]:
    """A format's figures; four tokens' memory ceiling is 10 ms."""
    arm = {"tok_per_s": 5.0}
    decoding = {"arms": {"plain": arm, "tree": arm}, "tree_over_plain": {"median": 2.0, "ci95": [1.9, 2.1]}}
    ms = {"2": narrow_ms, "8": 1.25 * narrow_ms, "16": 1.9 * narrow_ms}
    return {
        "quality": {"ratio": ratio},
        "forward": {"memory_ms": 10.0, "ms": {size: {"median": each} for size, each in ms.items()}},
        "temperatures": {"0": decoding},
        "resident_bytes": resident,
    }


def missed(formats: Mapping[str, Any]) -> list[str]:
    return [goal["goal"] for goal in goals_of(formats) if not goal["reached"]]


def test_the_resident_part_of_a_file_counts_once_however_often_it_is_mapped() -> None:
    assert resident_bytes(Path("/store/pair/target/weights.safetensors"), MAPS) == 16 << 10
    assert resident_bytes(Path("/store/pair/none"), MAPS) == 0


def test_the_losses_of_a_text_are_those_of_its_log_probabilities(tiny: LoadedPair) -> None:
    text = "Once upon a time there was a cat. " * 12
    tokens = tiny.tokenizer.encode(text)
    target = tiny.engine.target
    assert len(tokens) > target.prefill_chunk
    [(loss, count), (first_loss, _)] = text_losses(tiny, [text, text[:17]])
    one_by_one = 0.0
    target.cache.rollback_(0)
    for place, token in enumerate(tokens[1:]):
        meta_NM = target.meta(1)
        pack_chain_(meta_NM, [tokens[place]], place)
        logits_NV, _ = target.forward(meta_NM)
        target.cache.commit_(range(1))
        one_by_one -= float(logits_NV[0].float().log_softmax(-1)[token])
    assert count == len(tokens) - 1
    assert loss == pytest.approx(one_by_one, rel=1e-5)
    assert 0 < first_loss < loss


def test_a_ratio_of_perplexities_is_over_all_tokens() -> None:
    before = [(2 * math.log(2), 2), (6 * math.log(2), 6)]
    found = perplexity_of([(2 * math.log(4), 2), (6 * math.log(2), 6)], before)
    assert found["perplexity"] == pytest.approx(2**1.25, abs=1e-4)
    assert found["ratio"] == pytest.approx(2**0.25, abs=1e-5)
    assert found["ci95"] == [1.0, 2.0]
    assert perplexity_of(before, before)["ratio"] == 1.0


def test_goals_are_missed_one_by_one() -> None:
    bf16 = found(1.0, 20.0, 100)
    assert missed({"bf16": bf16, "int8": found(1.0009, 11.0, 52)}) == ["int8: T(16)/T(1)"]
    assert missed({"bf16": bf16, "int4": found(1.029, 11.0, 35)}) == []
    wrong = found(1.031, 12.0, 36)
    assert missed({"bf16": bf16, "int4": wrong}) == [
        "int4: change of perplexity",
        "int4: T(1) over bytes / rate",
        "int4: memory over bf16's",
    ]


def test_a_better_perplexity_counts_as_a_change_too() -> None:
    assert "int8: change of perplexity" in missed({"int8": found(0.998, 11.0, 52)})


def test_the_table_shows_every_format_and_every_goal() -> None:
    formats = {"bf16": found(1.0, 20.0, 100), "int4": found(1.012, 11.0, 30)}
    text = table({"gb_per_s": 30.0, "formats": formats, "goals": goals_of(formats)})
    assert "+1.20 %" in text
    assert "T(16)" in text
    assert text.count("reached") == len(goals_of(formats))


def test_a_rehearsal_measures_the_tiny_pair(
    tiny: LoadedPair, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CLAIM.parse(["--quick"])
    assert options == argparse.Namespace(**vars(options) | {"rounds": 2, "prompts": 2, "tokens": 16})
    monkeypatch.setattr(claim_quantised, "MemoryStream", lambda: argparse.Namespace(gb_per_s=lambda: 10.0))
    rate, forwards = measure_forwards({"bf16": tiny}, options.rounds, lambda line: None)
    assert rate == 10.0
    assert list(forwards["bf16"]["ms"]) == [str(size) for size in tiny.engine.target.menu.sizes]
    decoding = measure_decoding({"bf16": tiny}, 0.8, options, lambda line: None)
    assert set(decoding["bf16"]["arms"]) == {"plain", "tree"}


def test_a_tree_with_other_tokens_than_plain_decoding_of_its_format_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def arms_of(pair: Any, weights: str, num_tokens: int, temperature: float) -> list[Arm]:
        return [arm(f"{weights} plain", pair), arm(f"{weights} tree", pair + (weights == "int4"))]

    def arm(name: str, token: int) -> Arm:
        done = Generation(token_ids=[token], total_ms=1.0, first_ms=1.0, first_tokens=1, target_passes=1)
        return Arm(name=name, generate=lambda prompt: done, exact=False)

    monkeypatch.setattr(claim_quantised, "arms_of", arms_of)
    monkeypatch.setattr(claim_quantised, "beginnings", lambda texts, pair, count: [[1]])
    pairs: Any = {"int8": 3, "int4": 7}
    with pytest.raises(TextMismatchError, match="int4 tree differs from int4 plain on prompt 0 at token 0"):
        measure_decoding(pairs, 0.0, CLAIM.parse([]), lambda line: None)


def test_a_run_leaves_no_format_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        CLAIM.parse(["--weights", "int8"])
    assert "unrecognized arguments: --weights" in capsys.readouterr().err
