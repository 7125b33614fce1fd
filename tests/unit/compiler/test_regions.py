"""Graphs that are compiled by region: equal layers once.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = features of a head.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import transformers as t
from torch import Tensor

from yggdrasil.compiler.graphs import LoadedGraph, compile_graph
from yggdrasil.compiler.model import cache_constants
from yggdrasil.compiler.regions import read_regions, regions_of
from yggdrasil.errors import ArtifactError
from yggdrasil.kv import KVCache
from yggdrasil.models.forward import DraftForward, TargetForward
from yggdrasil.models.load import load_model, pack_linears_
from yggdrasil.models.packing import empty_meta, pack_chain_
from yggdrasil.models.support import kv_shape

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB = 96
NUM_LAYERS = 6
NUM_TOKENS = 4


def model_of(folder: Path, **fields: Any) -> Any:
    """A model whose linear layers are packed."""
    config = t.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **fields,
    )
    torch.manual_seed(0)
    t.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    model = load_model(str(folder), dtype=torch.bfloat16)
    pack_linears_(model)
    return model


def forward_of(model: Any, kind: str) -> tuple[TargetForward | DraftForward, KVCache]:
    """The forward of a target or a draft, and its cache."""
    cache = KVCache(kv_shape(model.config, 32), dtype=torch.bfloat16, device="cpu")
    if kind == "target":
        return TargetForward(model, cache, VOCAB), cache
    return DraftForward(model, cache, VOCAB, num_candidates=4), cache


def exported(forward: TargetForward | DraftForward) -> torch.export.ExportedProgram:
    return torch.export.export(forward, (empty_meta(NUM_TOKENS, 5),), strict=False)


def run(path: Path, model: Any, kind: str, weights: dict[str, Tensor]) -> list[Tensor]:
    """Outputs of two forwards of four tokens, and the cache after them."""
    _, cache = forward_of(copy.deepcopy(model), kind)
    cache.storage_PL2GSF.zero_()
    graph = LoadedGraph(path, {**weights, **cache_constants(cache)}, "")
    outputs = []
    for start in (0, NUM_TOKENS):
        meta_NM = empty_meta(NUM_TOKENS, 5)
        pack_chain_(meta_NM, [5, 1, 3, 7], start, num_read=NUM_TOKENS)
        outputs += [output.clone() for output in graph(meta_NM)]
    return [*outputs, cache.storage_PL2GSF]


@pytest.mark.parametrize("kind", ("target", "draft"))
@torch.no_grad()
def test_a_chain_of_regions_computes_what_the_whole_graph_computes(tmp_path: Path, kind: str) -> None:
    """Up to a rounding of bfloat16 between layers; and it writes the same cache."""
    model = model_of(tmp_path / "model")
    forward, _ = forward_of(model, kind)
    tensors = [*forward.named_parameters(remove_duplicate=False), *forward.named_buffers()]
    weights = {name: tensor for name, tensor in tensors if name.startswith("model.")}
    found = []
    for by_region in (True, False):
        path = tmp_path / f"{by_region}.pt2"
        compile_graph(copy.deepcopy(forward), empty_meta(NUM_TOKENS, 5), path, by_region=by_region)
        assert read_regions(path).kinds == ([0, *[1] * NUM_LAYERS, 2] if by_region else ())
        found.append(run(path, model, kind, weights))
    for ours, whole in zip(*found, strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours.float(), whole.float(), atol=0.03, rtol=0.03)
    assert found[0][-1].float().abs().sum() > 0


def test_layers_that_differ_are_kinds_of_their_own(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    del model.model.layers[4].mlp.gate_proj.packed  # its gate is another function
    model.model.layers[4].mlp.act_fn = torch.nn.GELU()
    model.model.layers[4].mlp.gate_proj = model.model.layers[3].mlp.gate_proj
    split = regions_of(exported(forward_of(model, "target")[0]))
    assert split is not None
    chain, kinds = split
    assert chain.kinds == [0, 1, 1, 1, 1, 2, 1, 3]
    assert len(kinds) == 4


def test_a_graph_without_equal_layers_is_not_split(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    assert regions_of(exported(forward_of(model, "target")[0])) is None


@pytest.mark.parametrize("damage", ("missing", "no archive", "no chain", "a chain of another form"))
def test_a_damaged_package_is_reported(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "graph.pt2"
    if damage == "no archive":
        path.write_bytes(b"no archive")
    elif damage != "missing":
        with ZipFile(path, "w") as archive:
            archive.writestr("graph/extra/regions.json", "[" if damage == "no chain" else "[1, 2, 3, 4]")
    with pytest.raises(ArtifactError, match="corrupt"):
        LoadedGraph(path, {"weight": torch.zeros(1)}, "ygg compile")
