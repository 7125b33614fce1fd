"""A pair with rounded weights writes plain decoding's text with the same weights; its graphs compute what
the reference does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import SMALLEST, compiled
from plain_texts import PROMPTS, SAMPLED, assert_equal_to_plain, assert_streamed_equal

from yggdrasil.bundle import compile_command, read_bundle
from yggdrasil.config import SamplingConfig
from yggdrasil.kernels.linear import PackedLinear, reference
from yggdrasil.kv import KVCache
from yggdrasil.models.forward import TargetForward
from yggdrasil.models.load import load_model, pack_linears_
from yggdrasil.models.packing import empty_meta, pack_chain_
from yggdrasil.models.proof import deviation
from yggdrasil.offline.build import read_quality
from yggdrasil.pair import LoadedPair, load_pair

# target and draft
FORMATS = (("int8", "int4"), ("int4", "bf16"))


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def pair(
    request: pytest.FixtureRequest, ygg_home: Path, llama_folders: tuple[str, str], kernels: None
) -> LoadedPair:
    """The Llama pair in bfloat16 with rounded weights and the smallest menu."""
    weights, draft_weights = request.param
    config = replace(SMALLEST, weights=weights, draft_weights=draft_weights)
    compiled(ygg_home, f"llama{config.rounded}", llama_folders, config)
    return load_pair(f"llama{config.rounded}")


@pytest.mark.parametrize("sampling", (SamplingConfig(), SAMPLED), ids=("greedy", "sampled"))
def test_speculation_writes_what_plain_decoding_writes_with_the_same_weights(
    pair: LoadedPair, sampling: SamplingConfig
) -> None:
    assert_equal_to_plain(pair, sampling)


def test_a_token_has_the_same_bits_in_every_graph(pair: LoadedPair) -> None:
    assert pair.bundle.inexact_widths == ()


def test_weights_that_no_cache_keeps_give_the_same_bits(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_streamed_equal(pair, monkeypatch)


def test_graphs_read_weights_in_the_chosen_formats(pair: LoadedPair) -> None:
    config = pair.bundle.config
    models = (pair.engine.target, config.weights), (pair.engine.draft, config.draft_weights)
    for model, weights in models:
        packed = [tensor for name, tensor in model.weights.items() if name.endswith(".packed")]
        assert {tensor.dtype for tensor in packed} == {torch.bfloat16 if weights == "bf16" else torch.int8}
        group_bytes = {"int8": 1056, "int4": 288}.get(weights)
        assert group_bytes is None or {tensor.shape[2] for tensor in packed} == {group_bytes}


@torch.no_grad()
def test_graphs_compute_what_the_reference_computes(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs fuse layers, which rounds less often, so they agree to bfloat16's rounding."""
    bundle = pair.bundle
    model = load_model(bundle.models[0], dtype=torch.bfloat16)
    pack_linears_(model, weights=bundle.config.weights)
    eager = TargetForward(
        model, KVCache(bundle.kv_target, dtype=torch.bfloat16, device="cpu"), bundle.vocab
    )
    tokens = pair.tokenizer.encode(PROMPTS[0])
    graph_NM = pair.engine.target.meta(len(tokens))
    eager_NM = empty_meta(len(tokens), bundle.config.path_depth)
    pair.engine.target.cache.rollback_(0)
    for meta_NM in (graph_NM, eager_NM):
        pack_chain_(meta_NM, tokens, 0)
    calls = []

    def forward(layer: PackedLinear, x: torch.Tensor, meta_NM: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(layer)
        return reference(x, layer.packed, layer.bias, layer.out_features)

    monkeypatch.setattr(PackedLinear, "forward", forward)
    expected_NV = eager(eager_NM)[0]
    assert len(calls) == 2 * 7 + 1
    ours_NV = pair.engine.target.forward(graph_NM)[0][: len(tokens)]
    assert deviation(ours_NV, expected_NV) < 0.03


def test_the_bundle_has_what_rounding_changes(pair: LoadedPair) -> None:
    bundle = read_bundle(pair.bundle.name)
    assert bundle.quality == read_quality(bundle)
    assert bundle.quality["tokens"] > 100
    assert 0.8 < bundle.quality["ratio"] < 1.2
    draft = bundle.config.draft_weights.replace("bf16", "bfloat16")
    formats = f"weights of the target {bundle.config.weights}, of the draft {draft}"
    assert bundle.weights.startswith(f"{formats}: perplexity ")


def test_the_command_of_a_pair_names_its_weights(pair: LoadedPair) -> None:
    bundle = pair.bundle
    command = compile_command(bundle.name, bundle.models, bundle.config, "")
    assert f"--weights {bundle.config.weights}" in command
    assert ("--draft-weights int4" in command) == (bundle.config.draft_weights == "int4")
