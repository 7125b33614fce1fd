"""A text that begins like the last one keeps its KV: the same bits, the same text, fewer prompt tokens.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from yggdrasil import engine as engine_module
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import YggError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.page_order import by_slot
from yggdrasil.pair import LoadedPair
from yggdrasil.state import PLAIN, DecodeState, Shape
from yggdrasil.step.growth import prefill

START = "Once upon a time there was a red fox named Tom. "
TURNS = (
    START,
    f"{START}Tom liked to run in the forest. One day Tom saw a grey owl near the river.",
    f"{START}Tom liked to sing.",
    "Once upon a time there was a red fox",
    "The owl said: let us dance together!",
    START,
)
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.9, seed=3)


def write(
    pair: LoadedPair,
    prompt: list[int],
    sampling: SamplingConfig = GREEDY,
    *,
    keep: bool,
    plain: bool = False,
    num_steps: int = 100,
) -> list[int]:
    """The tokens of a generation, or of its first steps."""
    config = GenerateConfig(max_new_tokens=24, ignore_eos=True, plain=plain, sampling=sampling)
    policy = pair.policy(shape=Shape(4, 3), temperature=sampling.temperature)
    steps = pair.engine.generate(prompt, policy, config, keep=keep)
    return [token for _, result in zip(range(num_steps), steps, strict=False) for token in result.tokens]


def stored(model: TokenModel) -> Tensor:
    """Committed keys and values, in the order of the text."""
    in_order = by_slot(model.cache.storage_PL2GSF).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    return in_order[:, :, :, : model.cache.len].clone()


def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the prompt tokens that each model runs in chunks."""
    counts = {"target": 0, "draft": 0}

    def counting(model: TokenModel, tokens: list[int]) -> Tensor | None:
        name = "target" if model is engine.target else "draft"
        counts[name] += max(0, len(tokens) - model.cache.len)
        return prefill(model, tokens)

    monkeypatch.setattr(engine_module, "prefill", counting)
    return counts


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("plain", (False, True), ids=("trees", "plain"))
def test_a_text_after_any_other_is_that_of_a_fresh_start(
    tiny: LoadedPair, sampling: SamplingConfig, plain: bool
) -> None:
    prompts = [tiny.tokenizer.encode(turn) for turn in TURNS]
    fresh = [write(tiny, prompt, sampling, keep=False, plain=plain) for prompt in prompts]
    assert [write(tiny, prompt, sampling, keep=True, plain=plain) for prompt in prompts] == fresh
    assert [write(tiny, prompt, sampling, keep=True) for prompt in prompts] == fresh


def test_kept_kv_has_the_bits_of_a_fresh_start(tiny: LoadedPair) -> None:
    engine = tiny.engine
    first, second = (tiny.tokenizer.encode(turn) for turn in TURNS[:2])
    prompt = slice(len(second) - 1)
    write(tiny, second, keep=False, num_steps=2)
    expected = [stored(model)[:, :, :, prompt] for model in (engine.target, engine.draft)]
    write(tiny, first, keep=False)
    write(tiny, second, keep=True, num_steps=2)
    assert engine.kept_len > 0
    for model, fresh in zip((engine.target, engine.draft), expected, strict=True):
        assert torch.equal(stored(model)[:, :, :, prompt], fresh)


def test_a_second_turn_computes_only_its_new_tokens(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tiny.tokenizer.encode(" ".join(3 * [START]))
    answer = write(tiny, first, keep=False)
    second = [*first, *answer, *tiny.tokenizer.encode(" One day Tom saw an owl. " * 4)]
    new = len(second) - len(first) - len(answer)
    counts = computed(tiny.engine, monkeypatch)
    write(tiny, second, keep=True)
    # the last tokens of the first text were in no KV
    assert len(first) + len(answer) - 8 <= tiny.engine.kept_len <= len(first) + len(answer)
    for name, count in counts.items():
        assert count <= new + 8, name
    counts.update(target=0, draft=0)
    write(tiny, second, keep=False)
    assert tiny.engine.kept_len == 0
    assert counts["draft"] == len(second) - 1


def test_a_plain_turn_leaves_no_old_kv_to_the_draft(tiny: LoadedPair) -> None:
    first, second, third = (tiny.tokenizer.encode(turn) for turn in TURNS[:3])
    expected = write(tiny, second, keep=False)
    write(tiny, third, keep=True)
    write(tiny, first, keep=True, plain=True)
    assert write(tiny, second, keep=True) == expected
    write(tiny, first, keep=False, num_steps=1)
    alone = stored(tiny.engine.draft)
    write(tiny, third, keep=False)
    write(tiny, second, keep=True, plain=True)
    write(tiny, first, keep=True, num_steps=1)
    assert torch.equal(stored(tiny.engine.draft), alone)


def test_an_interrupted_step_or_prompt_leaves_no_wrong_kv(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tiny.tokenizer.encode(turn) for turn in TURNS[:2])
    expected = write(tiny, second, keep=False)

    class Interrupting:
        """Lets a number of steps pass, then Ctrl-C comes before or after a step."""

        is_guard = False
        drafts = True

        def __init__(self, num_steps: int, *, after: bool) -> None:
            self.inner = tiny.policy(shape=Shape(4, 3))
            self.left = num_steps
            self.after = after

        def choose(self, rows: object) -> object:
            self._count(not self.after)
            return self.inner.choose(rows)

        def observe(self, result: object) -> None:
            self._count(self.after)

        def _count(self, counts: bool) -> None:
            self.left -= counts
            if counts and self.left < 0:
                raise KeyboardInterrupt

    config = GenerateConfig(max_new_tokens=24, ignore_eos=True)
    for after in (False, True):
        for num_steps in range(3):
            policy = Interrupting(num_steps, after=after)
            with pytest.raises(KeyboardInterrupt):
                list(tiny.engine.generate(first, policy, config, keep=True))
            assert write(tiny, second, keep=True) == expected

    def interrupted(model: TokenModel, tokens: list[int]) -> None:
        prefill(model, tokens[: len(tokens) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tiny, tiny.tokenizer.encode(TURNS[4]), keep=True)
    assert write(tiny, second, keep=True) == expected


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("shape", (PLAIN, Shape(4, 3)), ids=str)
def test_steps_of_several_texts_may_alternate(
    tiny: LoadedPair, shape: Shape, sampling: SamplingConfig
) -> None:
    """Each finds another text in the KV; some of them begin alike."""
    prompts = [tiny.tokenizer.encode(turn) for turn in TURNS[:3]]
    alone = [write(tiny, prompt, sampling, keep=False, plain=True) for prompt in prompts]
    states = [DecodeState(list(prompt), sampling) for prompt in prompts]
    policy = tiny.policy(shape=shape)
    while min(state.num_emitted for state in states) < 24:
        for state in states:
            tiny.engine.step(state, policy)
    assert [list(state.emitted)[:24] for state in states] == alone


@pytest.mark.parametrize("stage", ("prefill", "_run"))
def test_a_step_after_an_interrupted_one_of_another_text_has_its_own_kv(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The interrupted step has written KV, and has not noted it."""
    engine = tiny.engine
    policy = tiny.policy(shape=Shape(4, 3))
    first, second = (DecodeState(tiny.tokenizer.encode(4 * turn)) for turn in (TURNS[0], TURNS[4]))
    expected = write(tiny, second.tokens, keep=False, plain=True)
    prompt = slice(second.root_pos)
    expected_kv = stored(engine.target)[:, :, :, prompt]
    where = engine_module if stage == "prefill" else engine
    written = getattr(where, stage)

    def interrupted(*args: Any, **options: Any) -> None:
        written(*args, **options)
        raise KeyboardInterrupt

    engine.step(second, policy)
    with monkeypatch.context() as patched:
        patched.setattr(where, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(first, policy)
    while second.num_emitted < 24:
        engine.step(second, policy)
    assert list(second.emitted)[:24] == expected
    assert torch.equal(stored(engine.target)[:, :, :, prompt], expected_kv)


def test_a_generation_ends_where_a_step_writes_another_text(tiny: LoadedPair) -> None:
    first, second = (tiny.tokenizer.encode(turn) for turn in (TURNS[0], TURNS[4]))
    steps = tiny.engine.generate(first, tiny.policy(), GenerateConfig(max_new_tokens=24, ignore_eos=True))
    next(steps)
    tiny.engine.step(DecodeState(list(second)), tiny.policy())
    with pytest.raises(YggError, match="another generation has begun"):
        next(steps)


def test_the_draft_runs_a_prompt_only_for_a_step_that_drafts(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.engine
    prompt = tiny.tokenizer.encode(TURNS[1])
    counts = computed(engine, monkeypatch)
    plain, drafting = (tiny.policy(shape=shape, guard=False) for shape in (PLAIN, Shape(4, 3)))
    state = DecodeState(list(prompt))
    engine.step(state, drafting)
    assert engine.draft.cache.len >= len(prompt) - 1
    assert counts["draft"] == len(prompt) - 1
    state = DecodeState(tiny.tokenizer.encode(TURNS[4]) * 3)
    counts["draft"] = 0
    for _ in range(4):
        engine.step(state, plain)
    assert counts["draft"] == engine.draft.cache.len == 0
    # a text that is under way does not wait for its whole prompt
    assert engine.step(state, drafting).caught_up
    assert counts["draft"] == engine.draft.prefill_chunk


def test_caches_that_something_else_wrote_are_not_kept(tiny: LoadedPair) -> None:
    first, second = (tiny.tokenizer.encode(turn) for turn in TURNS[:2])
    other = tiny.tokenizer.encode(TURNS[4])
    expected = write(tiny, second, keep=False)
    write(tiny, first, keep=False)
    for model in (tiny.engine.target, tiny.engine.draft):
        model.cache.rollback_(0)
        prefill(model, other)
    assert write(tiny, second, keep=True) == expected
    assert tiny.engine.kept_len == 0
    state = DecodeState(list(other))
    tiny.engine.step(state, tiny.policy(shape=PLAIN))
    assert write(tiny, second, keep=True) == expected
