"""End tokens and sampling defaults that come with a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yggdrasil.errors import BrokenCheckpoint
from yggdrasil.models.defaults import end_tokens, unapplied_defaults


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
        ({}, []),
        # sampling is off, so its options have no effect
        (
            {
                "repetition_penalty": 1.0,
                "no_repeat_ngram_size": 0,
                "temperature": 0.7,
                "max_length": 4096,
                "pad_token_id": 0,
            },
            [],
        ),
        ({"repetition_penalty": 1.05}, ["repetition_penalty=1.05 (there is no such option yet)"]),
        ({"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 50}, []),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            ["temperature=0.6, top_p=0.9 (give them with each request)"],
        ),
        (
            {"no_repeat_ngram_size": 3, "do_sample": True, "top_k": 20},
            ["no_repeat_ngram_size=3 (", "; top_k=20 ("],
        ),
    ],
)
def test_the_note_names_defaults_that_are_not_applied(
    tmp_path: Path, settings: Any, expected: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    note = unapplied_defaults(str(tmp_path))
    assert bool(note) == bool(expected)
    assert "\n" not in note
    assert [part for part in expected if part not in note] == []


def test_a_model_without_a_generation_config_has_no_note(tmp_path: Path) -> None:
    assert unapplied_defaults(str(tmp_path)) == ""
