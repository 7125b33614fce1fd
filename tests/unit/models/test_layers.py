"""A model with fewer of its layers is the model without the others, and so is its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_pair
import torch
from torch import nn

from yggdrasil.models.layers import keep_in_config_, keep_layers_, layer_list, name_before


def small(architecture: str, num_layers: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_pair.random_config(architecture, num_layers=num_layers)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("architecture", ("qwen3", "gpt_neox"))
@torch.no_grad()
def test_the_rest_of_a_model_computes_what_it_computes_with_identities_for_the_others(
    architecture: str,
) -> None:
    tokens = torch.arange(12)[None]
    whole = small(architecture, 4)
    name = layer_list(whole)
    assert name is not None
    layers = whole.get_submodule(name)
    for layer in (1, 3):
        layers[layer].register_forward_hook(_identity, with_kwargs=True)
    expected = whole(input_ids=tokens, use_cache=False).logits
    cut = small(architecture, 4)
    keep_layers_(cut, [0, 2])
    assert torch.equal(cut(input_ids=tokens, use_cache=False).logits, expected)
    assert cut.config.num_hidden_layers == 2


def _identity(layer: Any, given: Any, options: Any, output: Any) -> Any:
    hidden = given[0] if given else options["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def test_layers_that_remain_are_numbered_anew() -> None:
    cut = small("qwen3", 4)
    keep_layers_(cut, [1, 3])
    assert [layer.self_attn.layer_idx for layer in cut.model.layers] == [0, 1]


def test_lists_of_a_configuration_lose_the_entries_of_other_layers() -> None:
    config = tiny_pair.random_config("qwen3", num_layers=4)
    config.layer_types = ["full_attention", "sliding_attention"] * 2
    config.others = [1, 2]
    keep_in_config_(config, [1, 2, 3])
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config.num_hidden_layers, config.others) == (3, [1, 2])


def test_a_tensor_has_the_name_of_its_former_layer() -> None:
    before = name_before("model.layers", (2, 5, 11))
    assert before("model.layers.2.mlp.weight") == "model.layers.11.mlp.weight"
    assert before("model.layers.0.mlp.weight") == "model.layers.2.mlp.weight"
    assert before("model.norm.weight") == "model.norm.weight"


def test_a_model_without_one_list_of_layers_cannot_be_cut() -> None:
    model = small("qwen3", 2)
    model.others = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    assert layer_list(model) is None
