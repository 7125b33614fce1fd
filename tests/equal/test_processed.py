"""Text under logits processors: trees write what plain decoding writes, and that is transformers' text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_exact import PROMPTS, SHAPES, decode, engine_by_stages

from yggdrasil.config import MOST_COUNT, ProcessorConfig, SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair

BANNED = ((262,), (312, 313))
PROCESSORS = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bias": ({"logit_bias": {259: -20.0, 33: 2.0}}, {"sequence_bias": [[[259], -20.0], [[33], 2.0]]}),
    "bans": ({"banned": BANNED}, {"bad_words_ids": [list(sequence) for sequence in BANNED]}),
    "all": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "banned": BANNED, "logit_bias": {9: 1.0}},
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [list(sequence) for sequence in BANNED],
            "sequence_bias": [[[9], 1.0]],
        },
    ),
    "shortest text": ({"min_tokens": 20}, {"min_new_tokens": 20}),
}
"""Our options, and transformers'."""
OPENAI = {
    "presence_penalty": 0.8,
    "frequency_penalty": 0.5,
    "min_tokens": 8,
    "logit_bias": {5: -float("inf")},
}


@pytest.fixture(scope="module")
def model(llama_folders: tuple[str, str]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama_folders[0], dtype=torch.float32).eval()


@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_text_is_that_of_transformers_with_the_same_processors(
    tiny: LoadedPair, model: Any, name: str
) -> None:
    ours, theirs = PROCESSORS[name]
    for prompt in PROMPTS:
        tokens = torch.tensor([tiny.tokenizer.encode(prompt)])
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=48,
            pad_token_id=0,
            **theirs,
        )
        sampling = SamplingConfig.of(ours)
        for shape in SHAPES:
            text = decode(tiny, prompt, shape, num_tokens=48, sampling=sampling)
            assert text == written[0, tokens.shape[1] :].tolist(), f"{prompt!r}, {shape}"


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("name", (*PROCESSORS, "openai"))
def test_trees_write_the_text_of_plain_decoding(tiny: LoadedPair, name: str, temperature: float) -> None:
    ours = OPENAI if name == "openai" else PROCESSORS[name][0]
    sampling = SamplingConfig.of({**ours, "temperature": temperature, "seed": 3})
    by_stages = replace(tiny, engine=engine_by_stages(tiny))
    for prompt in PROMPTS[:2]:
        options: dict[str, Any] = {"sampling": sampling, "num_tokens": 32, "ignore_eos": True}
        if name == "shortest text":
            options["stop_tokens"] = (262,)
        plain = decode(tiny, prompt, None, plain=True, **options)
        assert plain != decode(tiny, prompt, None, plain=True, **{**options, "sampling": SamplingConfig()})
        for shape in SHAPES:
            assert decode(tiny, prompt, shape, **options) == plain, str(shape)
        assert decode(by_stages, prompt, SHAPES[3], **options) == plain


def test_a_stop_token_ends_the_text_and_is_part_of_it(tiny: LoadedPair) -> None:
    whole = decode(tiny, PROMPTS[0], None, num_tokens=24, ignore_eos=True)
    last = whole[10]
    expected = whole[: whole.index(last) + 1]
    for plain in (True, False):
        text = decode(
            tiny, PROMPTS[0], None, plain=plain, num_tokens=24, ignore_eos=True, stop_tokens=(last,)
        )
        assert text == expected


def test_ends_without_a_logit_do_not_disturb_the_shortest_text(tiny: LoadedPair) -> None:
    sampling = SamplingConfig.of({"min_tokens": 6})
    expected = decode(tiny, PROMPTS[0], None, num_tokens=12, sampling=sampling)
    for plain in (True, False):
        text = decode(
            tiny, PROMPTS[0], None, plain=plain, num_tokens=12, sampling=sampling, stop_tokens=(10**12,)
        )
        assert text == expected


@pytest.mark.parametrize("name", ("min_tokens", "no_repeat_ngram_size", "top_k"))
def test_the_largest_count_is_decoded_in_both_forms_of_the_step(tiny: LoadedPair, name: str) -> None:
    sampling = SamplingConfig.of({name: 10**30 if name == "top_k" else MOST_COUNT, "temperature": 0.8})
    by_stages = replace(tiny, engine=engine_by_stages(tiny))
    options: dict[str, Any] = {"sampling": sampling, "num_tokens": 8, "ignore_eos": True}
    plain = decode(tiny, PROMPTS[0], None, plain=True, **options)
    assert len(plain) == 8
    assert decode(by_stages, PROMPTS[0], SHAPES[3], **options) == plain


def test_a_token_without_a_logit_is_refused(tiny: LoadedPair) -> None:
    sampling = SamplingConfig(processors=ProcessorConfig(banned=((10**6,),)))
    with pytest.raises(ConfigError, match="1000000"):
        decode(tiny, PROMPTS[0], None, sampling=sampling)
