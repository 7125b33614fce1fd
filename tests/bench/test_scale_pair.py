"""An inflated checkpoint computes what its source computes, and every weight that was added is a weight of
its own.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from bench.lib.pair import LLAMA_2_7B, LLAMA_68M
from bench.scale_pair import inflate, inflated_config, num_parameters
from yggdrasil.bundle import bundled_models

SHAPE: dict[str, Any] = {"width_multiple": 4, "layers": 5, "intermediate": 400, "heads": 8}


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        eos_token_id=None,
        bos_token_id=None,
    )


@pytest.fixture(scope="module", params=("float32", "bfloat16"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random source and its inflation, both loaded again from disk."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    for name, parameter in model.named_parameters():  # wide enough that logits differ and norms matter
        parameter.data.normal_(float("norm" in name), 0.2)
    model.to(getattr(torch, request.param)).save_pretrained(folder / "source")
    announced = inflate(folder / "source", folder / "inflated", **SHAPE)
    source, inflated = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto").eval()
        for name in ("source", "inflated")
    )
    assert announced == sum(parameter.numel() for parameter in inflated.parameters())
    return source, inflated


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits.float()


def test_inflated_logits_equal_the_source_logits(pair: tuple[Any, Any]) -> None:
    source, inflated = pair
    assert inflated.dtype == source.dtype
    tokens = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(1))
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.06}[source.dtype]
    expected = logits(source, tokens)
    torch.testing.assert_close(
        logits(inflated, tokens), expected, rtol=0, atol=tolerance * float(expected.std())
    )


def test_inflated_model_writes_the_same_greedy_text(pair: tuple[Any, Any]) -> None:
    source, _ = pair
    if source.dtype != torch.float32:
        pytest.skip("in bf16 the sums are rounded in another order: close, but not equal")
    prompts = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(2))
    written = [
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
        )
        for model in pair
    ]
    assert written[0].shape == (2, 72)
    assert torch.equal(*written)


def test_no_two_added_matrices_are_alike(pair: tuple[Any, Any]) -> None:
    source, inflated = pair
    old = source.state_dict()
    added = {name: _added(tensor, old.get(name)) for name, tensor in inflated.state_dict().items()}
    zero = {name for name, values in added.items() if not values.any()}
    assert {name.split(".")[-2] for name in zero} == {"embed_tokens", "o_proj", "down_proj"}
    assert len(zero) == 1 + 2 * SHAPE["layers"]
    random = [values[:64] for name, values in added.items() if name not in zero]
    assert all(len(values) == 64 for values in random)
    assert not any(torch.equal(one, other) for one, other in combinations(random, 2))


def _added(tensor: Tensor, source: Tensor | None) -> Tensor:
    """The entries of a tensor that the source does not have, flat."""
    is_added = torch.ones_like(tensor, dtype=torch.bool)
    if source is not None:
        is_added[tuple(slice(size) for size in source.shape)] = False
    return tensor[is_added]


def test_defaults_make_a_target_of_real_size() -> None:
    bundled_shape = LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
    )
    config = inflated_config(bundled_shape)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (1536, 24, 8)
    assert num_parameters(config) > 250_000_000


def test_any_width_computes_the_function_and_every_query_head_may_have_its_own_kv_head(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    for name, parameter in model.named_parameters():
        parameter.data.normal_(float("norm" in name), 0.2)
    model.save_pretrained(tmp_path / "source")
    inflate(
        tmp_path / "source",
        tmp_path / "inflated",
        width=160,
        layers=3,
        intermediate=200,
        heads=10,
        kv_heads=10,
    )
    source, inflated = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").eval()
        for name in ("source", "inflated")
    )
    assert (
        inflated.config.hidden_size,
        inflated.config.num_attention_heads,
        inflated.config.num_key_value_heads,
    ) == (160, 10, 10)
    tokens = torch.randint(0, 300, (3, 40))
    expected = logits(source, tokens)
    torch.testing.assert_close(
        logits(inflated, tokens), expected, rtol=0, atol=1e-4 * float(expected.std())
    )


def test_the_shapes_of_a_real_pair_are_reached() -> None:
    target, draft = (AutoConfig.from_pretrained(folder) for folder in bundled_models())
    target = inflated_config(target, **LLAMA_2_7B)
    draft = inflated_config(draft, **LLAMA_68M)
    assert (
        target.hidden_size,
        target.intermediate_size,
        target.num_hidden_layers,
        target.num_attention_heads * target.head_dim,
    ) == (4096, 11008, 32, 4096)
    assert target.num_key_value_heads == target.num_attention_heads
    assert (
        draft.hidden_size,
        draft.intermediate_size,
        draft.num_hidden_layers,
        draft.num_attention_heads * draft.head_dim,
    ) == (768, 3072, 2, 768)


@pytest.mark.parametrize(
    "wrong",
    (
        {"width_multiple": 2},
        {"width_multiple": 9},
        {"width_multiple": 0},
        {"heads": 5},
        {"heads": 2},
        {"heads": 12},
        {"width": 32},
        {"heads": 8, "kv_heads": 2},
        {"layers": 1},
        {"intermediate": 64},
    ),
)
def test_a_shape_that_cannot_hold_the_source_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        inflated_config(tiny_config(), **wrong)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        inflate(tmp_path, tmp_path)
