"""Which drafts are tried, which are refused, and that layers without effect are dropped first."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from conftest import SMALLEST

from yggdrasil.bundle import Bundle
from yggdrasil.config import AUTO, CompileConfig
from yggdrasil.errors import ConfigError
from yggdrasil.offline.inputs import describe_pair
from yggdrasil.offline.own_draft import formats_of, layer_counts, with_own_draft
from yggdrasil.offline.traces import CALIBRATION_TEXT

ALONE = replace(SMALLEST, draft_weights=AUTO)


def described(target: str, config: CompileConfig) -> Bundle:
    return describe_pair(target, None, "pair", config, CALIBRATION_TEXT)


def chosen(target: str, config: CompileConfig, texts: list[str]) -> Bundle:
    return with_own_draft(described(target, config), texts, tiny_pair.SilentProgress())


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory, llama_folders: tuple[str, str]) -> str:
    """The Llama target with a layer in its middle that changes nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("padded")
    model = AutoModelForCausalLM.from_pretrained(llama_folders[0])
    config = AutoConfig.from_pretrained(llama_folders[0])
    config.num_hidden_layers = 3
    longer: Any = AutoModelForCausalLM.from_config(config)
    state = {name: tensor for name, tensor in longer.state_dict().items() if ".layers.1." in name}
    for name, tensor in model.state_dict().items():
        state[name.replace(".layers.1.", ".layers.2.")] = tensor
    for name, tensor in state.items():
        if ".layers.1." in name and ("o_proj" in name or "down_proj" in name):
            state[name] = torch.zeros_like(tensor)
    longer.load_state_dict(state)
    longer.save_pretrained(folder)
    for path in Path(llama_folders[0]).glob("tokenizer*"):
        shutil.copy(path, folder)
    return str(folder)


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ({}, ("int4", "int8")),
        ({"weights": "int8"}, ("int4", "int8")),
        ({"weights": "int4"}, ("int4",)),
        ({"draft_weights": "int8"}, ("int8",)),
        ({"draft_weights": "bf16"}, ("bf16",)),
        ({"ranks": 2}, ("bf16",)),
    ),
)
def test_a_draft_s_weights_are_smaller_than_the_target_s(
    options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert formats_of(replace(ALONE, **options)) == expected


def test_drafts_have_all_layers_or_three_quarters_a_half_and_a_quarter() -> None:
    assert layer_counts(12, ALONE, is_cuttable=True) == [12, 9, 6, 3]
    assert layer_counts(2, ALONE, is_cuttable=True) == [2, 1]
    assert layer_counts(12, ALONE, is_cuttable=False) == [12]
    assert layer_counts(12, replace(ALONE, draft_layers=5), is_cuttable=True) == [5]


@pytest.mark.parametrize(
    ("options", "complaint"),
    (
        (
            {"draft_layers": 3},
            "draft_layers: 3 is not allowed; it must be at most 2, the layers of the tar",
        ),
        ({"weights": "int4", "draft_weights": "int8"}, "draft_weights: 'int8' .* the target's, int4"),
        ({"weights": "int8", "draft_weights": "int8", "draft_layers": 2}, "draft_layers: 2 .* from 1 to 1"),
        ({"draft_weights": "bf16", "draft_layers": 2}, "draft_layers: 2 .* from 1 to 1"),
        ({"weights": "int4", "draft_layers": 2}, "draft_layers: 2 .* from 1 to 1"),
    ),
)
def test_a_draft_that_cannot_be_quicker_than_its_target_is_refused(
    llama_folders: tuple[str, str], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        described(llama_folders[0], replace(ALONE, **options))


@pytest.mark.parametrize(
    ("options", "complaint"),
    (
        ({"draft_layers": 1}, "draft_layers: 1 .* left out where a draft is given"),
        ({"draft_weights": AUTO}, "draft_weights: 'auto' .* where a draft is given"),
    ),
)
def test_a_given_draft_is_not_changed(
    llama_folders: tuple[str, str], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        describe_pair(*llama_folders, "pair", replace(SMALLEST, **options), CALIBRATION_TEXT)


def test_a_layer_that_changes_nothing_is_dropped_first(padded: str, kernels: None) -> None:
    texts = tiny_pair.stories(8, seed=99)
    bundle = chosen(padded, replace(ALONE, draft_weights="bf16", draft_layers=2), texts)
    assert bundle.draft_layers == (0, 2)
    assert bundle.kv_draft.num_layers == 2
    assert bundle.own_draft is not None
    assert bundle.own_draft.chosen.agreement == 1.0


def test_the_same_files_give_the_same_draft_and_another_choice_another_pair(
    padded: str, kernels: None
) -> None:
    texts = tiny_pair.stories(8, seed=99)
    first = chosen(padded, ALONE, texts)
    assert chosen(padded, ALONE, texts) == first
    assert first.own_draft is not None
    assert len(first.own_draft.candidates) == 2 * len({3, 2, 1})
    folders = {
        chosen(padded, replace(ALONE, draft_weights="int8", draft_layers=count), texts).folder
        for count in (1, 2, 3)
    }
    assert len(folders) == 3


def test_a_choice_that_is_asked_for_gives_the_pair_of_the_same_choice(padded: str, kernels: None) -> None:
    texts = tiny_pair.stories(8, seed=99)
    first = chosen(padded, ALONE, texts)
    asked = chosen(padded, first.config, texts)
    assert asked.draft_layers == first.draft_layers
    assert asked.config == first.config
    assert asked.folder == first.folder
