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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the packages, which are built once."""
    return tmp_path_factory.mktemp("regions")


@pytest.fixture(scope="module")
def model(folder: Path, kernels: None) -> Any:
    return model_of(folder / "model")


def forward_of(model: Any, kind: str) -> tuple[TargetForward | DraftForward, KVCache]:
    """The forward of a target or a draft, and its cache."""
    cache = KVCache(kv_shape(model.config, 32), dtype=torch.bfloat16, device="cpu")
    if kind == "target":
        return TargetForward(model, cache, VOCAB), cache
    return DraftForward(model, cache, VOCAB, num_candidates=4), cache


def exported(forward: TargetForward | DraftForward) -> torch.export.ExportedProgram:
    return torch.export.export(forward, (empty_meta(NUM_TOKENS, 5),), strict=False)


def built(
    folder: Path, model: Any, kind: str, *, num_tokens: int = NUM_TOKENS, by_region: bool = True
) -> Path:
    """The package of a graph."""
    path = folder / f"{kind}_{num_tokens}_{by_region}.pt2"
    if not path.exists():
        forward, _ = forward_of(copy.deepcopy(model), kind)
        compile_graph(forward, empty_meta(num_tokens, 5), path, by_region=by_region)
        assert read_regions(path).kinds == ([0, *[1] * NUM_LAYERS, 2] if by_region else ())
    return path


def run(path: Path, model: Any, kind: str) -> list[Tensor]:
    """Both outputs for the last of two chunks of four tokens, and the cache after them."""
    forward, cache = forward_of(copy.deepcopy(model), kind)
    cache.storage_PL2GSF.zero_()
    tensors = [*forward.named_parameters(remove_duplicate=False), *forward.named_buffers()]
    weights = {name: tensor for name, tensor in tensors if name.startswith("model.")}
    graph = LoadedGraph(path, {**weights, **cache_constants(cache)}, False, "")
    outputs: list[Tensor] = []
    for start in (0, NUM_TOKENS):
        meta_NM = empty_meta(int(path.stem.split("_")[1]), 5)
        pack_chain_(meta_NM, [5, 1, 3, 7], start, num_read=NUM_TOKENS)
        outputs = [output[:NUM_TOKENS].clone() for output in graph(meta_NM)]
    return [*outputs, cache.storage_PL2GSF]


@torch.no_grad()
def test_regions_compute_what_the_whole_graph_computes(folder: Path, model: Any) -> None:
    """Up to a rounding of bfloat16 between layers; and they write the same cache."""
    ours = run(built(folder, model, "target"), model, "target")
    whole = run(built(folder, model, "target", by_region=False), model, "target")
    for own, other in zip(ours, whole, strict=True):
        torch.testing.assert_close(own.float(), other.float(), atol=0.03, rtol=0.03)
        assert own.float().abs().sum() > 0


@torch.no_grad()
def test_bits_of_a_token_do_not_depend_on_the_size_of_its_graph(folder: Path, model: Any) -> None:
    narrow = run(built(folder, model, "target"), model, "target")
    wide = run(built(folder, model, "target", num_tokens=2 * NUM_TOKENS), model, "target")
    assert all(torch.equal(one, other) for one, other in zip(narrow, wide, strict=True))


@torch.no_grad()
def test_a_draft_by_region_returns_the_likeliest_tokens(folder: Path, model: Any) -> None:
    logits_NV, _, _ = run(built(folder, model, "target"), model, "target")
    tokens_NC, log_probs_NC, _ = run(built(folder, model, "draft"), model, "draft")
    best = logits_NV.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(tokens_NC[:, :4], best.indices[:, :4])
    torch.testing.assert_close(log_probs_NC[:, :4], best.values[:, :4], atol=1e-4, rtol=1e-4)


def test_layers_that_differ_are_kinds_of_their_own(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    model.model.layers[4].mlp.act_fn = torch.nn.GELU()
    split = regions_of(exported(forward_of(model, "target")[0]))
    assert split is not None
    regions, of_kind = split
    assert regions.kinds == [0, 1, 1, 1, 1, 2, 1, 3]
    assert len(of_kind) == 4


def test_a_graph_without_equal_layers_is_not_split(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    assert regions_of(exported(forward_of(model, "target")[0])) is None


@pytest.mark.parametrize("damage", ("missing", "no archive", "no list", "a list of another form"))
def test_a_damaged_package_is_reported(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "graph.pt2"
    if damage == "no archive":
        path.write_bytes(b"no archive")
    elif damage != "missing":
        with ZipFile(path, "w") as archive:
            archive.writestr("graph/extra/regions.json", "[" if damage == "no list" else "[1, 2, 3, 4]")
    with pytest.raises(ArtifactError, match="corrupt"):
        LoadedGraph(path, {"weight": torch.zeros(1)}, False, "ygg compile")
