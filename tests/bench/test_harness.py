"""The harness compares texts before speeds, gives every arm the same conditions, and computes the ratios it
prints.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.lib import harness
from bench.lib.harness import (
    SETTLE_SECONDS,
    Arm,
    Generation,
    MemoryStream,
    TextMismatchError,
    interleave,
    ratio,
    spread,
)


def scripted(
    name: str,
    calls: list[tuple[str, int]],
    *,
    offset: int = 0,
    exact: bool = True,
    num_prompts: int | None = None,
) -> Arm:
    """An arm that emits the prompt's token four times, the last one moved by `offset`."""

    def generate(prompt: Sequence[int]) -> Generation:
        calls.append((name, prompt[0]))
        tokens = [prompt[0]] * 3 + [prompt[0] + offset]
        return Generation(token_ids=tokens, total_ms=10.0, first_ms=4.0, first_tokens=1, target_passes=2)

    return Arm(name=name, generate=generate, exact=exact, num_prompts=num_prompts)


def test_arms_take_turns_and_rotate_after_one_warm_up_each() -> None:
    calls: list[tuple[str, int]] = []
    arms = [scripted("a", calls), scripted("b", calls), scripted("c", calls, num_prompts=1)]
    rounds = interleave(arms, [[1], [2], [3]], reference="a")
    assert calls == [
        ("a", 1),
        ("b", 1),
        ("c", 1),
        ("a", 1),
        ("b", 1),
        ("c", 1),
        ("b", 2),
        ("a", 2),
        ("a", 3),
        ("b", 3),
    ]
    assert {name: len(done) for name, done in rounds.by_arm.items()} == {"a": 3, "b": 3, "c": 1}


def test_an_exact_arm_with_other_tokens_ends_the_run() -> None:
    calls: list[tuple[str, int]] = []
    with pytest.raises(TextMismatchError, match="b differs from a on prompt 0 at token 3"):
        interleave([scripted("a", calls), scripted("b", calls, offset=1)], [[1]], reference="a")


def test_an_inexact_arm_with_other_tokens_is_counted() -> None:
    calls: list[tuple[str, int]] = []
    rounds = interleave(
        [scripted("a", calls), scripted("b", calls, offset=1, exact=False)], [[1], [2]], reference="a"
    )
    assert rounds.agreement("b", "a") == {"equal_prompts": 0, "prompts": 2, "first_difference_at": [3, 3]}


def test_times_per_token_count_the_whole_call_and_decoding_alone() -> None:
    done = scripted("a", []).generate([1])
    assert (done.tpot_ms, done.later_tpot_ms, done.aal) == (2.5, 2.0, 2.0)


def test_ratios_are_taken_prompt_by_prompt() -> None:
    found = ratio([2.0, 30.0, 8.0, 1.0], [1.0, 10.0, 2.0])
    assert (found["median"], found["prompts"]) == (3.0, 3)
    assert found["ci95"] == [2.0, 4.0]
    assert spread([1.0, 2.0, 3.0]) == {"median": 2.0, "p10": 1.2, "p90": 2.8}


def test_the_memory_stream_reads_every_word() -> None:
    assert MemoryStream(2**20).gb_per_s(rounds=1) > 0  # asserts the sum itself


def test_the_memory_stream_returns_after_its_threads_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(harness.time, "sleep", slept.append)
    MemoryStream(2**20).gb_per_s(rounds=2)
    assert slept == [SETTLE_SECONDS]
