"""The check of our forward: right models pass in both dtypes, and every kind of wrong one is refused.

Shapes: L = tokens of a passage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from yggdrasil.errors import UnsupportedModel
from yggdrasil.kernels.linear import reference
from yggdrasil.kv import KVCache
from yggdrasil.models import proof
from yggdrasil.models.attention import IMPLEMENTATION, register_attention
from yggdrasil.models.forward import TargetForward
from yggdrasil.models.load import pack_linears_
from yggdrasil.models.packing import empty_meta
from yggdrasil.models.proof import TOLERANCE, check_forward, deviation, expected_passages
from yggdrasil.models.rope import FROZEN, freeze_ropes_
from yggdrasil.models.support import kv_shape

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
POSITIONS = 200


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    register_attention()
    model = (
        t.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        .eval()
        .requires_grad_(False)
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(6)  # attention that prefers some tokens
    return model


def prove(model: Any, num_positions: int = POSITIONS, *, pack: bool = True) -> None:
    passages = expected_passages("mine", model, 96, num_positions)
    if pack:
        pack_linears_(model)
    check_forward("mine", model, kv_shape(model.config, 0), passages, num_positions)


def llama(**others: Any) -> t.LlamaConfig:
    return t.LlamaConfig(**SIZES, max_position_embeddings=256, **others)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("layers", (2, 24))
def test_right_forwards_of_few_and_many_layers_are_accepted(
    dtype: torch.dtype, layers: int, kernels: None
) -> None:
    sizes = {**SIZES, "num_hidden_layers": layers}
    prove(built(t.Qwen3Config(**sizes, head_dim=32, max_position_embeddings=256), dtype))


def test_the_model_keeps_tree_attention(kernels: None) -> None:
    model = built(llama())
    expected_passages("mine", model, 96, POSITIONS)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_a_layer_that_calls_attention_twice_is_refused(kernels: None) -> None:
    with pytest.raises(
        UnsupportedModel, match="mine: DiffLlamaForCausalLM, whose layer 0 asks for attention 2 times"
    ):
        prove(built(t.DiffLlamaConfig(**SIZES)))


def test_a_layer_that_never_calls_attention_is_refused(kernels: None) -> None:
    model = built(llama())
    passages = expected_passages("mine", model, 96, POSITIONS)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **others: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match="layer 1 asks for attention 0 times"):
        check_forward("mine", model, kv_shape(model.config, 0), passages, POSITIONS)


def test_attention_to_later_tokens_is_refused(kernels: None) -> None:
    config = t.BertConfig(**{**SIZES, "num_key_value_heads": 4}, max_position_embeddings=256)
    with pytest.raises(
        UnsupportedModel, match="BertLMHeadModel, which this runtime computes wrongly .its logits differ"
    ):
        prove(built(config))


class Mixing(nn.Module):
    """A layer that sees the row before: right in a chain, wrong where that row is a sibling."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_1NE: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x_1NE + x_1NE.roll(1, dims=1))
        return out


def test_a_layer_that_mixes_tokens_outside_attention_is_refused(kernels: None) -> None:
    model = built(llama())
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModel, match="computes wrongly"):
        prove(model)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_other_weights_and_other_positions_are_refused_in_both_dtypes(
    dtype: torch.dtype, kernels: None
) -> None:
    model = built(llama(), dtype)
    passages = expected_passages("mine", model, 96, POSITIONS)
    shape = kv_shape(model.config, 0)
    shifted = [
        passage._replace(start_pos=passage.start_pos + 1, logits_LV=passage.logits_LV.roll(1, dims=0))
        for passage in passages
    ]
    with pytest.raises(UnsupportedModel, match="computes wrongly"):
        check_forward("mine", model, shape, shifted, POSITIONS)
    model.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    with pytest.raises(UnsupportedModel, match="computes wrongly"):
        check_forward("mine", model, shape, passages, POSITIONS)


def test_a_window_shorter_than_the_context_is_refused(kernels: None) -> None:
    config = t.MistralConfig(**SIZES, sliding_window=POSITIONS - 1, max_position_embeddings=256)
    with pytest.raises(
        UnsupportedModel, match=f"layer 0 has a window of {POSITIONS - 1} tokens for {POSITIONS} positions"
    ):
        prove(built(config))
    prove(built(config), POSITIONS - 1)


def test_attention_sinks_are_refused(kernels: None) -> None:
    config = t.GraniteSWAConfig(**SIZES, max_position_embeddings=256, sliding_window=256, pad_token_id=0)
    with pytest.raises(UnsupportedModel, match="layer 0 attends with 's_aux'"):
        prove(built(config))


def test_heads_that_differ_from_the_configuration_are_refused(kernels: None) -> None:
    model = built(llama())
    passages = expected_passages("mine", model, 96, POSITIONS)
    other = t.LlamaConfig(**{**SIZES, "num_key_value_heads": 4})
    with pytest.raises(
        UnsupportedModel,
        match=r"attends with \[\[1, 4, 16, 16\], .* where config.json promises 2 layers of 4 heads",
    ):
        check_forward("mine", model, kv_shape(other, 0), passages, POSITIONS)


def test_a_forward_that_fails_or_is_not_finite_is_refused() -> None:
    learned = t.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    with pytest.raises(UnsupportedModel, match=f"own forward fails at position {POSITIONS - 24}"):
        prove(built(learned))  # it has no more positions
    model = built(llama())
    model.lm_head.weight[0] = torch.inf
    with pytest.raises(UnsupportedModel, match="own logits at position 0 are not finite"):
        prove(model)


def rope_llama(kind: str) -> Any:
    ropes = {
        "longrope": {
            "short_factor": [1.5] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 128,
            "factor": 2.0,
        },
        "dynamic": {"factor": 2.0},
    }
    positions = {"longrope": 256, "dynamic": 128}[kind]
    return t.LlamaConfig(
        **SIZES,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **ropes[kind]},
    )


@pytest.mark.parametrize("kind", ("longrope", "dynamic"))
def test_rotary_embeddings_are_right_up_to_the_length_where_they_change(kind: str, kernels: None) -> None:
    prove(built(rope_llama(kind)), 128)
    with pytest.raises(UnsupportedModel, match="computes wrongly"):
        prove(built(rope_llama(kind)), 137)


@pytest.mark.parametrize("kind", ("longrope", "dynamic"))
def test_frozen_rotary_embeddings_equal_those_of_transformers_at_every_position(kind: str) -> None:
    model = built(rope_llama(kind))
    tokens = (torch.arange(128) * 7 % 96)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        freeze_ropes_(model)
        assert model.model.rotary_emb.rope_type == FROZEN
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize("kind", ("longrope", "dynamic"))
def test_frozen_rotary_embeddings_are_one_static_graph(kind: str, kernels: None) -> None:
    model = built(rope_llama(kind))
    cache = KVCache(kv_shape(model.config, 32), dtype=torch.float32, device="cpu")
    graph = torch.export.export(TargetForward(model, cache, 96), (empty_meta(4, 5),), strict=False).graph
    # no forward writes its frequencies
    assert [node for node in graph.nodes if "copy_" in str(node.target)] == []


def test_a_deviation_is_that_of_the_worst_token_in_standard_deviations() -> None:
    expected_LV = torch.tensor([[-1.0, 1.0, -1.0, 1.0], [-3.0, 3.0, -3.0, 3.0]])
    spread = float(expected_LV[0].std())
    assert deviation(expected_LV, expected_LV) == 0
    ours_LV = expected_LV + torch.tensor([[0.5], [-0.5]])
    assert deviation(ours_LV, expected_LV) == pytest.approx(0.5 / spread)
    assert not deviation(expected_LV.where(expected_LV > 0, torch.nan), expected_LV) <= max(
        TOLERANCE.values()
    )


@pytest.mark.parametrize("weights", ("int8", "int4"))
def test_rounded_layers_that_differ_from_their_reference_are_a_defect(
    weights: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 3, bias=False))
    model.dtype = torch.float32
    pack_linears_(model, weights=weights)
    proof.check_rounded("mine", model)
    monkeypatch.setattr(proof, "reference", lambda *arguments: reference(*arguments) + 1)
    with pytest.raises(RuntimeError, match="mine: 0 with rounded weights differs from its reference"):
        proof.check_rounded("mine", model)
