"""Incomplete checkpoints, and those that do not fit their configuration, are refused in one line."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from conftest import TINY
from safetensors.torch import load_file, save_file

from yggdrasil.errors import BrokenCheckpoint, ConfigError, YggError
from yggdrasil.models.checkpoint import check_weights
from yggdrasil.models.load import load_config, load_model
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.offline.inputs import describe_pair
from yggdrasil.offline.traces import CALIBRATION_TEXT

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4943162336\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of one file."""
    t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A whole checkpoint of several files."""
    t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    return tmp_path / "sharded"


def check(folder: Path) -> None:
    check_weights(folder, load_config(str(folder)))


def refusal(folder: Path) -> str:
    with pytest.raises(BrokenCheckpoint) as caught:
        check(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_whole_checkpoints_pass(folder: Path, sharded: Path) -> None:
    for each in (folder, sharded):
        check(each)
        load_model(str(each), dtype=torch.float32)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    assert re.search(
        rf"{lost.name} is missing, 1 of the \d files that model.safetensors.index.json names; download "
        r"the model again",
        refusal(sharded),
    )


@pytest.mark.parametrize("kept", (0, 7, 100, -1))
def test_a_file_that_ends_early_is_named(sharded: Path, kept: int) -> None:
    cut = sorted(sharded.glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:kept])
    assert re.search(rf"{cut.name}: cut off.* bytes.*; download the model again", refusal(sharded))


def test_a_pickle_that_ends_early_is_named(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    check(folder)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-100])
    assert "pytorch_model.bin: cut off" in refusal(folder)


@pytest.mark.parametrize("content", (b"abc", b"", pickle.dumps([1, 2])))
def test_what_is_no_pickle_of_weights_is_an_error_of_one_line(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="a causal LM that transformers loads"):
        load_model(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("header", (b"[]", b"{", b'{"a": 1}', b'{"a": {"shape": [1]}}', b"\xff" * 9))
def test_an_invalid_header_is_named(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its header is no header of safetensors" in refusal(folder)


@pytest.mark.parametrize("content", ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'))
def test_an_invalid_index_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: " in refusal(sharded)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights: it has neither model.safetensors nor pytorch_model.bin" in refusal(folder)


@pytest.mark.parametrize("name", ("model.safetensors", "config.json", "tokenizer.json"))
def test_a_git_lfs_pointer_is_named_with_the_command(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    with pytest.raises(
        BrokenCheckpoint, match=f"{name}: a Git LFS pointer, not the file itself; git lfs pull"
    ):
        load_config(str(folder))


def test_embeddings_of_another_size_than_in_the_configuration_are_named(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 100}))
    assert re.search(
        r"(lm_head|model.embed_tokens).weight is 96 x 64, where config.json makes it 100 x 64",
        refusal(folder),
    )
    with pytest.raises(BrokenCheckpoint, match="where config.json makes it"):
        load_model(str(folder), dtype=torch.float32)


def test_sizes_that_do_not_fit_together_are_an_error_of_one_line(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "rope_parameters": {"rope_type": "linear"}})
    )
    with pytest.raises(YggError) as caught:
        check(folder)
    assert "\n" not in str(caught.value)


def test_missing_tensors_are_counted_and_the_first_is_named(folder: Path) -> None:
    def without_a_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    change(folder, without_a_layer)
    with pytest.raises(
        BrokenCheckpoint,
        match=r"9 of the model's tensors are missing, the first is "
        r"model\.layers\.1\.input_layernorm\.weight",
    ):
        load_model(str(folder), dtype=torch.float32)


def test_tied_weights_are_not_missing(folder: Path) -> None:
    t.LlamaForCausalLM(t.LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_model(str(folder), dtype=torch.float32)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}))
    assert "model.norm.weight is 32, where config.json makes it 64" in refusal(folder)
    with pytest.raises(
        BrokenCheckpoint, match=r"model.norm.weight is \[32\], where config.json makes it \[64\]"
    ):
        load_model(str(folder), dtype=torch.float32)


def test_unused_biases_are_refused_and_other_unused_tensors_are_not(folder: Path) -> None:
    change(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "mtp.weight": torch.ones(2)}
        ),
    )
    load_model(str(folder), dtype=torch.float32)
    change(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(
        BrokenCheckpoint,
        match=r"1 biases? .*, the first is model\.layers\.1\.self_attn\.q_proj\.bias; correct config.json",
    ):
        load_model(str(folder), dtype=torch.float32)


def test_broken_checkpoints_are_refused_before_operators_are_built(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    for which in (0, 1):
        folders = [Path(name) for name in llama_folders]
        folders[which] = Path(shutil.copytree(folders[which], tmp_path / str(which)))
        path = folders[which] / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(BrokenCheckpoint, match=f"{path}: cut off"):
            describe_pair(*map(str, folders), "pair", TINY, CALIBRATION_TEXT)


def test_an_invalid_tokenizer_is_an_error_of_one_line(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    folder = Path(shutil.copytree(llama_folders[0], tmp_path / "model"))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(ConfigError, match="tokenizer: .* is not allowed"):
        load_tokenizer(str(folder))


def test_nothing_reads_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "unheard-of", "auto_map": {"AutoConfig": "mine.Mine"}})
    )
    with pytest.raises(YggError):
        load_config(str(folder))
