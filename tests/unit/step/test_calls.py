"""Calls from Python: results of a generation, where it stops, and a clear error for each wrong argument."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import yggdrasil
from yggdrasil import GenerateConfig, TextStream, TokenTree
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.report.run import ENOUGH_STEPS, Run
from yggdrasil.state import PLAIN, DecodeState, Shape, StepResult

PROMPT = "Once upon a time"
LONG = GenerateConfig(max_new_tokens=64, ignore_eos=True)


def emitted(pair: LoadedPair, config: GenerateConfig, shape: Shape | None) -> list[int]:
    prompt = pair.tokenizer.encode(PROMPT)
    return [
        token
        for result in pair.engine.generate(prompt, pair.policy(shape=shape), config)
        for token in result.tokens
    ]


@pytest.mark.parametrize("shape", (None, PLAIN, Shape(1, 4), Shape(4, 4)), ids=str)
def test_generation_ends_at_the_token_that_completes_a_stop_text(
    tiny: LoadedPair, shape: Shape | None
) -> None:
    whole = emitted(tiny, LONG, PLAIN)
    text = tiny.tokenizer.decode(whole)
    for stop in (text[30:34], text[31], text[-9:-5]):
        config = replace(LONG, stop=("never written", stop))
        tokens = emitted(tiny, config, shape)
        assert tokens == whole[: len(tokens)]
        assert stop in tiny.tokenizer.decode(tokens)
        assert stop not in tiny.tokenizer.decode(tokens[:-1])
        run = Run(tiny, tiny.tokenizer.encode(PROMPT), config, policy=tiny.policy(shape=shape)).complete()
        assert (run.tokens, run.finish_reason) == (tokens, "stop")
        assert run.text == text[: text.index(stop)]


def test_a_stop_text_that_does_not_occur_changes_nothing(tiny: LoadedPair) -> None:
    assert emitted(tiny, replace(LONG, stop=("never written",)), Shape(4, 4)) == emitted(
        tiny, LONG, Shape(4, 4)
    )


def test_an_engine_without_a_tokenizer_refuses_stop_texts(tiny: LoadedPair) -> None:
    engine = Engine(tiny.engine.target, tiny.engine.draft, max_context=tiny.bundle.max_context)
    with pytest.raises(
        ConfigError,
        match=r"stop: \('!',\) is not allowed; .* without a tokenizer; Engine\(\.\.\., tokenizer=",
    ):
        engine.generate([5], tiny.policy(), GenerateConfig(stop=("!",)))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (PROMPT, r"prompt: 'Once upon a time' .*a list of tokens; pair\.tokenizer\.encode\(text\)"),
        (b"Once", r"prompt: b'Once'"),
        (7, "prompt: 7 .*a list of tokens"),
        (None, "prompt: None .*a list of tokens"),
        ([[5, 6], [7]], r"prompt: \[5, 6\] .*one prompt at a time"),
        (torch.tensor([[5, 6], [7, 8]]), "one prompt at a time"),
        ([PROMPT, PROMPT], "one prompt at a time"),
        ([5, 6.0], r"prompt: 6\.0 .*whole numbers"),
        ([5, None], "prompt: None .*whole numbers"),
        ([5, -1], "prompt: -1 .*made of token ids from 0 to"),
        ([], "at least one token"),
    ],
    ids=str,
)
def test_an_invalid_prompt_is_refused_at_the_call(prompt: Any, complaint: str, tiny: LoadedPair) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        tiny.engine.generate(prompt, tiny.policy(), LONG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", (tuple, torch.tensor))
def test_any_sequence_of_whole_numbers_is_a_prompt(kind: Any, tiny: LoadedPair) -> None:
    prompt = tiny.tokenizer.encode(PROMPT)
    tokens = [
        token
        for result in tiny.engine.generate(kind(prompt), tiny.policy(), LONG)
        for token in result.tokens
    ]
    assert tokens == emitted(tiny, LONG, None)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"stop": "END"}, "stop: 'END' .*a tuple of texts"),
        ({"stop": (7,)}, r"stop: \(7,\) .*a tuple of texts"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens: 2\.5 .*whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens: '5' .*whole number"),
    ],
)
def test_an_invalid_request_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        GenerateConfig(**fields)


@pytest.mark.parametrize(
    ("width", "levels", "complaint"),
    [
        (1, (((1, 0),),), r"levels: \(1, 0\) .*under a node from 0 to 0, those of depth 0"),
        (1, (((-1, 0),),), r"levels: \(-1, 0\)"),
        (2, (((0, 0), (0, 1)), ((1, 0), (3, 0))), r"levels: \(3, 0\) .*from 1 to 2, those of depth 1"),
        (2, (((0, 0), (0, 1)), ((0, 2),)), r"levels: \(0, 2\)"),
        (1, (((0, -1),),), r"levels: \(0, -1\) .*rank 0 or above"),
        (2, (((0, 0), (0, 0)),), "levels: .*a place of its own"),
        (1, (((0, 0),), ()), "levels: .*at least one node a level"),
        (2, (((0, 0),),), r"width and depth: \(2, 1\) .*\(1, 1\)"),
    ],
)
def test_levels_that_are_not_a_tree_are_refused(width: int, levels: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Shape(width, len(levels), levels=levels)


@pytest.mark.parametrize(
    ("parents", "complaint"),
    [
        ([0, 1], r"parents: \[1\] .*0 to 0"),
        ([-1, 0], r"parents: \[-1\]"),
        ([7, 90], r"parents: \[7, 90\]"),
        ([0.0, 0.0], "parents: 'torch.float32' .*integers"),
    ],
)
def test_a_tree_does_not_grow_under_a_missing_node(parents: list[float], complaint: str) -> None:
    tree = TokenTree.root(token=5, capacity=8)
    with pytest.raises(ConfigError, match=complaint):
        tree.grow(torch.tensor(parents), torch.tensor([11, 12]), torch.tensor([-0.1, -0.5]))
    assert len(tree) == 1
    tree.check()


def test_a_text_stream_gives_the_text_of_a_run(tiny: LoadedPair) -> None:
    assert yggdrasil.TextStream is TextStream
    prompt = tiny.tokenizer.encode("the café ☕")
    config = GenerateConfig(
        max_new_tokens=64, ignore_eos=True, sampling=yggdrasil.SamplingConfig(temperature=2.0, seed=5)
    )
    stream = TextStream(tiny.tokenizer, after=prompt)
    printed = (
        "".join(
            stream.push(result.tokens) for result in tiny.engine.generate(prompt, tiny.policy(), config)
        )
        + stream.finish()
    )
    run = Run(tiny, prompt, config).complete()
    assert printed == run.text == tiny.tokenizer.decode(run.tokens)
    assert not printed.isascii()


def step(ms: float, shape: Shape, *, verified: int = 1, caught_up: bool = False) -> StepResult:
    return StepResult(
        [1], shape, verified, verified, 0, 1.0, lambda: TokenTree.root(1, 1), [0], ms, caught_up
    )


def slowdown(*results: StepResult) -> float | None:
    """Slowdown on a machine where a plain step takes 2 ms and a step with a chain of two 2 + 1 + 1 ms."""
    verify, draft = (Curve((0,), (1,), ((ms,),)) for ms in (2.0, 1.0))
    run = SimpleNamespace(
        pair=SimpleNamespace(latency=LatencyModel(draft, verify, 0.0, 0.0, 0.0)), results=results
    )
    assert isinstance(Run.slowdown, property)
    assert Run.slowdown.fget is not None
    found: float | None = Run.slowdown.fget(run)
    return found


def test_slowdown_is_the_median_of_measured_over_predicted_milliseconds() -> None:
    chain = Shape(1, 2, 3)
    assert slowdown(*(step(2.0, PLAIN) for _ in range(ENOUGH_STEPS))) == 1.0
    assert slowdown(*(step(12.0, chain, verified=3) for _ in range(ENOUGH_STEPS))) == 3.0
    hiccups = [step(500.0, PLAIN) for _ in range(3)]
    assert slowdown(*hiccups, *(step(2.0, PLAIN) for _ in range(ENOUGH_STEPS))) == 1.0


def test_few_steps_have_no_slowdown_and_catching_up_does_not_count() -> None:
    few = [step(9.0, PLAIN) for _ in range(ENOUGH_STEPS - 1)]
    assert slowdown(*few) is None
    assert slowdown(*few, step(50.0, PLAIN, caught_up=True)) is None


def test_a_draft_that_catches_up_is_timed(tiny: LoadedPair) -> None:
    engine = Engine(tiny.engine.target, tiny.engine.draft, max_context=tiny.bundle.max_context)
    for model in (engine.target, engine.draft):
        model.cache.rollback_(0)
    state = DecodeState(tiny.tokenizer.encode(PROMPT))
    while state.num_emitted <= engine.draft.prefill_chunk:
        engine.step(state, tiny.policy(shape=PLAIN))
    assert engine.trace.count["catch up"] == 0
    assert engine.step(state, tiny.policy(shape=Shape(4, 2))).caught_up
    assert engine.trace.count["catch up"] == 1
    assert engine.trace.total_ms["catch up"] > 0


def test_a_run_of_many_steps_has_a_slowdown(tiny: LoadedPair) -> None:
    run = Run(tiny, tiny.tokenizer.encode(PROMPT), LONG, policy=tiny.policy(shape=PLAIN)).complete()
    assert run.to_json()["slowdown"] > 0


def test_messages_are_one_line_for_any_value() -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(stop=("",))
    assert re.fullmatch(r"stop: \('',\) is not allowed; it must be .*", str(caught.value))
