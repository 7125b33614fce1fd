"""Outlines: models without weights, from which workers build graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from yggdrasil.compiler.weights import load_weights, save_weights
from yggdrasil.kv import KVCache
from yggdrasil.models.forward import TargetForward
from yggdrasil.models.load import load_model, outline_model, pack_linears_
from yggdrasil.models.packing import empty_meta
from yggdrasil.models.support import kv_shape

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB = 96
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in bfloat16 whose output embedding is tied to the input embedding."""
    config = t.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    t.Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(params=[True, False], ids=["packed", "not packed"])
def stored(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> dict[str, Tensor]:
    """The weights as a worker loads them; the checkpoint's own weight file is gone."""
    model = load_model(str(folder), dtype=torch.bfloat16)
    if request.param:
        pack_linears_(model)
    save_weights(model, tmp_path)
    (folder / "model.safetensors").unlink()
    weights = load_weights(tmp_path, "cpu", "ygg compile")
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def outline(folder: Path, stored: dict[str, Tensor]) -> Any:
    return outline_model(str(folder), stored, dtype=torch.bfloat16)


def kinds(tensors: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def test_a_graph_of_an_outline_has_the_stored_parameters(folder: Path, stored: dict[str, Tensor]) -> None:
    model = outline(folder, stored)
    cache = KVCache(kv_shape(model.config, 32), dtype=torch.bfloat16, device="cpu")
    forward = TargetForward(model, cache, VOCAB)
    exported = torch.export.export(forward, (empty_meta(4, 5),), strict=False)
    parameters = exported.graph_signature.parameters
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    assert set(parameters) == {f"model.{name}" for name in stored} - buffers
    expected = kinds((name, stored[name.removeprefix("model.")]) for name in parameters)
    assert kinds((name, exported.state_dict[name]) for name in parameters) == expected


def test_an_outline_ties_what_is_stored_once(folder: Path, stored: dict[str, Tensor]) -> None:
    parameters = dict(outline(folder, stored).named_parameters(remove_duplicate=False))
    assert parameters.keys() <= stored.keys()
    assert ("lm_head.packed" in stored) != ("lm_head.weight" in stored)
    for name, tensor in parameters.items():
        is_tied = stored[name].data_ptr() == stored[EMBEDDING].data_ptr()
        assert (tensor.data_ptr() == parameters[EMBEDDING].data_ptr()) == is_tied, name
        assert is_tied == (name in (EMBEDDING, "lm_head.weight"))


def test_an_outline_reads_no_values(folder: Path, stored: dict[str, Tensor]) -> None:
    without_values = {name: tensor.to("meta") for name, tensor in stored.items()}
    model = outline(folder, without_values)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    assert kinds(tensors) == kinds(stored.items())


def test_a_packed_weight_is_a_parameter_which_inductor_does_not_copy(
    folder: Path, stored: dict[str, Tensor]
) -> None:
    model = outline(folder, stored)
    packed = [name for name in stored if name.endswith(".packed")]
    assert len(packed) in (0, 8)
    assert all(isinstance(model.get_parameter(name), nn.Parameter) for name in packed)
