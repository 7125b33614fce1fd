"""End tokens and sampling defaults that come with a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yggdrasil.errors import BrokenCheckpoint
from yggdrasil.models.defaults import end_tokens, request_defaults, unapplied_defaults


def ends(folder: Path, generation: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return end_tokens(
        str(folder), SimpleNamespace(eos_token_id=config), SimpleNamespace(eos_token_id=tokenizer)
    )


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (None, None, None, ()),
        (None, None, 5, (5,)),
        (None, 7, 5, (7, 5)),
        (None, [7, 9], None, (7, 9)),
        (None, 5, 5, (5,)),
        ({}, 7, None, (7,)),
        ({"eos_token_id": None}, 7, None, (7,)),
        ({"eos_token_id": 0}, 7, 5, (0,)),
        ({"eos_token_id": [1, 2]}, 7, 5, (1, 2)),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_or_else_of_config_and_tokenizer(
    tmp_path: Path, generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    assert ends(tmp_path, generation, config, tokenizer) == expected


@pytest.mark.parametrize("value", ("2", [2, "3"], -1, 2.5, True, {}))
def test_end_tokens_that_are_not_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        BrokenCheckpoint,
        match="eos_token_id of generation_config.json is .*, not a token id or a list of token ids",
    ):
        ends(tmp_path, {"eos_token_id": value}, None, None)


@pytest.mark.parametrize("content", ("", "{", "[]", '"text"', "[" * 100_000))
def test_a_broken_generation_config_is_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    for read in (lambda: unapplied_defaults(str(tmp_path)), lambda: ends(tmp_path, None, 1, 1)):
        with pytest.raises(BrokenCheckpoint, match="generation_config.json: not (a )?JSON") as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.9, "max_length": 4096, "pad_token_id": 0}, {}),  # sampling is off
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"repetition_penalty": 1.05, "min_new_tokens": 3}, {"repetition_penalty": 1.05, "min_tokens": 3}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"bad_words_ids": [[4, 5]], "suppress_tokens": [7, 8]}, {"banned": [[4, 5], [7], [8]]}),
        # tokens that the pair does not have
        ({"bad_words_ids": [[4, 100]], "suppress_tokens": [7, 200]}, {"banned": [[7]]}),
    ],
)
def test_requests_have_the_defaults_of_the_model(tmp_path: Path, settings: Any, expected: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert request_defaults(str(tmp_path), vocab=100) == expected
    assert unapplied_defaults(str(tmp_path)) == ""


@pytest.mark.parametrize(
    "settings",
    (
        {"do_sample": True, "temperature": -1},
        {"repetition_penalty": 0},
        {"repetition_penalty": "high"},
        {"suppress_tokens": 7},
        {"suppress_tokens": [1.5]},
        {"no_repeat_ngram_size": 2.5},
        {"min_new_tokens": 10**30},
        {"do_sample": True, "top_k": "many"},
        {"do_sample": True, "top_k": 2.5},
        {"bad_words_ids": [[]]},
    ),
    ids=str,
)
def test_a_default_that_is_not_allowed_is_a_broken_checkpoint(tmp_path: Path, settings: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(BrokenCheckpoint, match=r"generation_config\.json"):
        request_defaults(str(tmp_path), vocab=100)


def test_the_note_names_settings_that_have_no_equivalent(tmp_path: Path) -> None:
    settings = {"num_beams": 4, "repetition_penalty": 1.1, "typical_p": 0.9, "guidance_scale": 1.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    note = unapplied_defaults(str(tmp_path))
    assert "num_beams=4, typical_p=0.9" in note
    assert "repetition_penalty" not in note
    assert "guidance_scale" not in note


def test_a_model_without_a_generation_config_has_no_note(tmp_path: Path) -> None:
    assert unapplied_defaults(str(tmp_path)) == ""
