"""transformers' `generate` over a compiled pair: its tensors, its arguments, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from yggdrasil.api import Pair
from yggdrasil.bridge import TAKEN, generate
from yggdrasil.errors import ConfigError

PROMPTS = ("Once upon a time", "Tom", "One day Lily saw a red fox near the café.")
END = 0


@pytest.fixture(scope="module")
def model(llama_folders: tuple[str, str]) -> Any:
    """The target of the pair in transformers, in float32 as the pair is."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama_folders[0], dtype=torch.float32).eval()


def padded(pair: Pair, pad: int = END) -> dict[str, Tensor]:
    """The prompts as a transformers tokenizer makes them, padded on the left."""
    rows = [pair.tokenizer.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


GREEDY: list[dict[str, Any]] = [
    {"max_new_tokens": 40},
    {},
    {"max_length": 45},
    {"do_sample": False, "num_beams": 1, "use_cache": True, "max_new_tokens": 24},
    {"repetition_penalty": 1.3, "max_new_tokens": 40},
    {"no_repeat_ngram_size": 3, "min_new_tokens": 30, "max_new_tokens": 40},
    {"eos_token_id": [13, 20, 30], "pad_token_id": 5, "max_new_tokens": 40},
    {"bad_words_ids": [[300], [301, 302]], "suppress_tokens": [303], "max_new_tokens": 24},
]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("arguments", GREEDY, ids=str)
def test_greedy_sequences_are_those_of_transformers(
    pair: Pair, model: Any, arguments: dict[str, Any]
) -> None:
    inputs = padded(pair)
    given = {"pad_token_id": END, **arguments}
    expected = model.generate(**inputs, **given)
    assert torch.equal(generate(pair, **inputs, **given), expected)
    for row, mask in zip(*inputs.values(), strict=True):
        prompt = {"input_ids": row[mask.bool()][None]}
        alone = model.generate(**prompt, attention_mask=torch.ones_like(prompt["input_ids"]), **given)
        assert torch.equal(generate(pair, **prompt, **given), alone)


def test_a_generation_config_is_read(pair: Pair, model: Any) -> None:
    from transformers import GenerationConfig

    inputs = padded(pair)
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, pad_token_id=END, eos_token_id=END)
    before = config.to_dict()
    expected = model.generate(**inputs, generation_config=config)
    assert torch.equal(generate(pair, **inputs, generation_config=config), expected)
    assert config.to_dict() == before
    longer = generate(pair, **inputs, generation_config=config, max_new_tokens=12)
    assert longer.shape[1] == expected.shape[1] + 3


def test_the_sampling_that_a_gguf_file_asks_for_is_the_targets_own(pair: Pair, tmp_path: Path) -> None:
    inputs = padded(pair)
    sampling = {"temperature": 0.7, "top_k": 5}
    expected = generate(pair, **inputs, max_new_tokens=24, do_sample=True, seed=3, **sampling)
    target = tmp_path / "target.gguf"
    target.touch()
    bundle = replace(pair.bundle, models=(str(target), pair.bundle.models[1]), defaults=sampling)
    assert torch.equal(
        generate(replace(pair, bundle=bundle), **inputs, max_new_tokens=24, seed=3), expected
    )


def test_what_a_generation_config_leaves_open_is_as_in_the_targets_own(
    pair: Pair, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    inputs = padded(pair)
    plain = generate(pair, **inputs, max_new_tokens=24, pad_token_id=END)
    own = GenerationConfig(repetition_penalty=1.5, eos_token_id=END, pad_token_id=END, max_new_tokens=5)
    monkeypatch.setattr(model, "generation_config", own)
    monkeypatch.setattr(GenerationConfig, "from_pretrained", lambda name: own)
    for given in ({}, {"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 3}):
        config = GenerationConfig(max_new_tokens=24, **given)
        expected = model.generate(**inputs, generation_config=config)
        assert torch.equal(generate(pair, **inputs, generation_config=config), expected)
        assert not torch.equal(expected, plain)
    assert own.max_new_tokens == 5


def test_token_ids_may_be_tensors(pair: Pair, model: Any) -> None:
    inputs = padded(pair)
    given: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": torch.tensor(END)}
    for ends in (torch.tensor(13), torch.tensor([13, 20, 30])):
        expected = model.generate(**inputs, **given, eos_token_id=ends)
        assert torch.equal(generate(pair, **inputs, **given, eos_token_id=ends), expected)


def test_the_tensors_of_the_targets_tokenizer_go_in_as_the_example_shows(
    pair: Pair, llama_folders: tuple[str, str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama_folders[0])
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    inputs = tokenizer(["Once upon a time", "One day"], return_tensors="pt", padding=True)
    sequences = generate(pair, **inputs, max_new_tokens=6)
    assert tokenizer.batch_decode(sequences, skip_special_tokens=True)[1].startswith("One day")


def test_only_a_sampled_text_without_a_seed_draws_from_torch_s_generator(pair: Pair) -> None:
    before = torch.get_rng_state()
    generate(pair, IDS, max_new_tokens=2)
    generate(pair, IDS, max_new_tokens=2, do_sample=True, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    generate(pair, IDS, max_new_tokens=2, do_sample=True)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_sampled_row_has_the_text_of_its_seed(pair: Pair) -> None:
    inputs = padded(pair)
    length = inputs["input_ids"].shape[1]
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}
    sequences = generate(pair, **inputs, **sampled, seed=5, eos_token_id=[])
    for place, prompt in enumerate(PROMPTS):
        options: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": 5 + place}
        alone = pair.generate(prompt, max_new_tokens=12, ignore_eos=True, **options)
        assert sequences[place, length:].tolist() == list(alone.tokens)
    wide = generate(pair, **inputs, **sampled, seed=5, eos_token_id=[], top_k=0)
    alone = pair.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=5)
    assert wide[0, length:].tolist() == list(alone.tokens)


def test_torch_s_generator_seeds_what_has_no_seed(pair: Pair) -> None:
    inputs = padded(pair)
    same = {key: value[:1].expand(3, -1) for key, value in inputs.items()}
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 24}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(generate(pair, **same, **options))
    assert torch.equal(texts[0], texts[1])
    assert texts[0].tolist() != texts[2].tolist()
    assert len({tuple(row) for row in texts[0].tolist()}) > 1


def test_without_sampling_its_settings_have_no_effect(pair: Pair) -> None:
    inputs = padded(pair)
    greedy = generate(pair, **inputs, max_new_tokens=12)
    assert torch.equal(generate(pair, **inputs, max_new_tokens=12, do_sample=False, top_k=3), greedy)


IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_beams": 4}, "num_beams: 4 is not allowed; it must be 1: nothing here does the same"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate: True"),
        ({"stop_strings": ["a"]}, "stop_strings: "),
        ({"max_time": 2.0}, "max_time: 2.0"),
        ({"streamer": print}, "argument: 'streamer' is not allowed; it must be one of max_new_tokens"),
        ({"assistant_model": IDS}, "argument: 'assistant_model'"),
        ({"logits_processor": [1]}, "argument: 'logits_processor'"),
        ({"maxnewtokens": 3}, "argument: 'maxnewtokens'"),
        ({"max_new_tokens": 10**6}, "max_new_tokens: 1000000 is not allowed; it must be at most"),
        ({"max_length": 3}, "max_new_tokens: 0 is not allowed"),
        ({"input_ids": IDS[0]}, "input_ids: "),
        ({"input_ids": [[1, 2]]}, "input_ids: [[1, 2]] is not allowed; it must be a tensor"),
        ({"input_ids": IDS.float()}, "a tensor of token ids"),
        ({"input_ids": IDS + 10**6}, "made of token ids from 0 to"),
        ({"input_ids": torch.tensor([[5, -100]])}, "prompt: -100 is not allowed; it must be made of token"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "0 at padding on the left and 1 after it"),
        ({"attention_mask": torch.tensor([[1, 1]])}, "attention_mask: [[1, 1]] is not allowed"),
        ({"pad_token_id": 6}, "attention_mask: None is not allowed; it must be given"),
        ({"do_sample": True, "top_p": 3.0}, "top_p"),
        ({"seed": 1.5}, "seed: 1.5 is not allowed"),
        ({"seed": "7"}, "seed: '7' is not allowed"),
        ({"seed": -1}, "seed: -1 is not allowed"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask: [[1, 1, 1]] is not allowed"),
        ({"generation_config": {"max_new_tokens": 3}}, "a GenerationConfig of transformers"),
        ({"bad_words_ids": [300]}, "bad_words_ids: [300] is not allowed"),
        ({"suppress_tokens": 5}, "suppress_tokens: 5 is not allowed"),
        ({"eos_token_id": "a"}, "eos_token_id: 'a' is not allowed"),
        ({"repetition_penalty": "a"}, "repetition_penalty: 'a' is not allowed"),
        ({"max_length": "a"}, "max_length: 'a' is not allowed"),
        ({"max_new_tokens": 0}, "arguments: {'max_new_tokens': 0} is not allowed"),
        ({"num_beams": torch.tensor([1, 2])}, "num_beams: tensor([1, 2]) is not allowed"),
        ({"input_ids": IDS > 5}, "a tensor of token ids"),
        ({"pair": "tinystories"}, "pair: 'tinystories' is not allowed; it must be a Pair"),
    ],
    ids=str,
)
def test_what_it_does_not_take_is_refused_by_name(
    pair: Pair, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(**{"pair": pair, "input_ids": IDS, **arguments})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


OTHER_TYPES: dict[str, list[Any]] = {
    "max_new_tokens": [1.5, "3", True, [3]],
    "max_length": [20.5, "20", True, torch.tensor(20.5)],
    "min_new_tokens": [1.5, "1", True, -1],
    "do_sample": ["no", 1, 0.0, [True]],
    "temperature": ["1", True, [1.0], 1j],
    "top_k": [1.5, "5", True, -1],
    "top_p": ["0.5", True, [0.5]],
    "min_p": ["0.5", True, [0.5]],
    "repetition_penalty": ["1", True, [1.0]],
    "no_repeat_ngram_size": [1.5, "2", True, -1],
    "eos_token_id": [1.5, "a", True, -1, 2**40, [1.5], [[1]], torch.tensor([1.5]), {1}],
    "pad_token_id": [1.5, "a", True, -1, 2**40, [0], torch.tensor(1.5), torch.tensor([0])],
    "bad_words_ids": [5, "ab", [300], [[1.5]], [["a"]], [[]], [[True]], {300: 1}],
    "suppress_tokens": [5, "ab", [1.5], [[1]], [True], torch.tensor([1.5])],
}


def test_every_argument_that_has_an_effect_has_values_of_other_types_here() -> None:
    assert OTHER_TYPES.keys() == TAKEN.keys()


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_a_value_of_another_type_is_refused_by_the_arguments_name(pair: Pair, name: str) -> None:
    for value in OTHER_TYPES[name]:
        given = {"do_sample": True, "max_new_tokens": 2, name: value}
        with pytest.raises(ConfigError, match=f"^{name}: .* is not allowed"):
            generate(pair, IDS, **given)


def test_a_value_of_another_type_is_refused_in_a_generation_config_and_in_the_targets_own(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=2)
    config.pad_token_id = 1.5
    with pytest.raises(ConfigError, match=r"^pad_token_id: 1\.5 is not allowed"):
        generate(pair, IDS, generation_config=config)
    monkeypatch.setattr(GenerationConfig, "from_pretrained", lambda name: config)
    with pytest.raises(ConfigError, match=r"^pad_token_id: 1\.5 is not allowed"):
        generate(pair, IDS)
