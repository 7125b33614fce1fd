"""Quantised checkpoints have the weights that their formats define; what is not read is refused by name.

Shapes: O = output features, I = input features.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import stored
import torch
from conftest import TINY
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from yggdrasil.config import CompileConfig
from yggdrasil.errors import BrokenCheckpoint, ConfigError, UnsupportedModel
from yggdrasil.models import gguf, load
from yggdrasil.models.defaults import end_tokens, request_defaults, unapplied_defaults
from yggdrasil.models.load import load_config, load_model, pack_linears_, stored_format
from yggdrasil.models.proof import check_forward, expected_passages
from yggdrasil.models.support import kv_shape
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.offline.inputs import describe_pair
from yggdrasil.offline.traces import CALIBRATION_TEXT

HAS_GGUF = all(importlib.util.find_spec(package) for package in ("gguf", "accelerate"))
needs_gguf = pytest.mark.skipif(not HAS_GGUF, reason="the extra `gguf` is not installed")


@pytest.fixture
def source(llama_folders: tuple[str, str]) -> Path:
    return Path(llama_folders[0])


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", stored.FORMATS)
def test_a_weight_is_the_number_times_its_scale_rounded_once(
    source: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    weights = stored.save_stored(source, tmp_path / "model", name)
    model = load_model(str(tmp_path / "model"), dtype=dtype)
    loaded = model.state_dict()
    assert len(weights) == 2 * 7
    for key, weight_OI in weights.items():
        assert torch.equal(loaded[key], weight_OI.to(dtype)), key
    for key, tensor in load_file(source / "model.safetensors").items():
        assert key in weights or torch.equal(loaded[key], tensor.to(dtype)), key
    assert stored_format(str(tmp_path / "model")) == name


@pytest.mark.usefixtures("kernels")
def test_the_forward_of_a_quantised_checkpoint_is_proved(source: Path, tmp_path: Path) -> None:
    stored.save_stored(source, tmp_path / "model", "GPTQ int4, groups of 32")
    name = str(tmp_path / "model")
    model = load_model(name, dtype=torch.bfloat16)
    passages = expected_passages(name, model, model.config.vocab_size, 256)
    pack_linears_(model)
    check_forward(name, model, kv_shape(model.config, 0), passages, 256)


def test_the_formats_of_a_pair_are_among_its_notes(
    llama_folders: tuple[str, str], source: Path, tmp_path: Path
) -> None:
    name = "GPTQ int4, groups of 32"
    stored.save_stored(source, tmp_path / "model", name)
    bundle = describe_pair(str(tmp_path / "model"), llama_folders[1], "pair", TINY, CALIBRATION_TEXT)
    assert f"the target's checkpoint has quantised weights ({name}), read as float32" in bundle.notes
    assert not any("the draft's checkpoint" in note for note in bundle.notes)


@pytest.mark.parametrize("name", ("gptq", "gptq_v2", "awq"))
def test_zero_points_are_subtracted_and_groups_may_be_out_of_order(
    source: Path, tmp_path: Path, name: str
) -> None:
    weights = stored.save_with_zeros(source, tmp_path / "model", name)
    loaded = load_model(str(tmp_path / "model"), dtype=torch.float32).state_dict()
    assert len(weights) == 2 * 7
    assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())


def test_a_bias_of_zeros_without_a_place_is_left_out_and_another_is_refused(
    source: Path, tmp_path: Path
) -> None:
    stored.save_stored(source, tmp_path / "model", "GPTQ int4, groups of 32")
    bias = "model.layers.1.mlp.up_proj.bias"
    change(tmp_path / "model", lambda tensors: tensors.update({bias: torch.zeros(128)}))
    load_model(str(tmp_path / "model"), dtype=torch.float32)
    change(tmp_path / "model", lambda tensors: tensors[bias].fill_(1.0))
    with pytest.raises(BrokenCheckpoint, match=bias):
        load_model(str(tmp_path / "model"), dtype=torch.float32)


def compressed(**changes: Any) -> dict[str, Any]:
    return {**stored.compressed_settings(), **changes}


REFUSED = {
    r"with quantized weights \(bitsandbytes\)": {"quant_method": "bitsandbytes"},
    r"with quantized weights \(method not named\)": {"bits": 4},
    "a GPTQ checkpoint with 3 bits": {**stored.GPTQ, "bits": 3},
    "a GPTQ checkpoint with the format 'marlin'": {**stored.GPTQ, "checkpoint_format": "marlin"},
    r"a GPTQ checkpoint with rules for single layers \(dynamic\)": {
        **stored.GPTQ,
        "dynamic": {"-:lm_head": {}},
    },
    "a GPTQ checkpoint with groups of 0": {**stored.GPTQ, "group_size": 0},
    "a GPTQ checkpoint with groups of 'all'": {**stored.GPTQ, "group_size": "all"},
    "an AWQ checkpoint with the format 'gemv'": {**stored.AWQ, "version": "GEMV"},
    "a compressed-tensors checkpoint with the format 'int-quantized'": compressed(format="int-quantized"),
    "a compressed-tensors checkpoint with 2 groups of layers": compressed(
        config_groups={"one": {}, "two": {}}
    ),
    "a compressed-tensors checkpoint with quantized keys and values": compressed(
        kv_cache_scheme={"num_bits": 8}
    ),
    "a compressed-tensors checkpoint with sparse weights": compressed(
        sparsity_config={"format": "sparse-24-bitmask"}
    ),
    "a compressed-tensors checkpoint with quantized activations": compressed(
        config_groups={"one": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}
    ),
    "a compressed-tensors checkpoint with 3 bits": stored.compressed_settings(3),
    "a compressed-tensors checkpoint with weights of type 'float'": stored.compressed_settings(
        type="float"
    ),
    r"a compressed-tensors checkpoint with zero points \(symmetric = False\)": stored.compressed_settings(
        symmetric=False
    ),
    "a compressed-tensors checkpoint with the strategy 'tensor'": stored.compressed_settings(
        strategy="tensor"
    ),
    r"a compressed-tensors checkpoint with groups out of order \(actorder\)": stored.compressed_settings(
        actorder="group"
    ),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_a_scheme_that_is_not_read_is_refused_by_the_configuration(
    source: Path, tmp_path: Path, feature: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    stored.set_config(folder, quantization_config=REFUSED[feature])
    with pytest.raises(UnsupportedModel, match=f"{folder}: .*{feature} is not supported") as caught:
        load_config(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        compressed(config_groups=["x"]),
        compressed(config_groups={"g": None}),
        compressed(sparsity_config=[1]),
        {**stored.GPTQ, "checkpoint_format": {"a": 1}},
    ],
    ids=str,
)
def test_a_scheme_of_another_form_is_one_line(
    source: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    stored.shutil.copy(source / "config.json", tmp_path)
    stored.set_config(tmp_path, quantization_config=settings)
    with pytest.raises(BrokenCheckpoint, match=r"quantization_config is none of .*; correct config\.json"):
        load_config(str(tmp_path))


def test_a_method_that_is_no_name_is_refused(source: Path, tmp_path: Path) -> None:
    stored.shutil.copy(source / "config.json", tmp_path)
    stored.set_config(tmp_path, quantization_config={"quant_method": ["gptq"]})
    with pytest.raises((UnsupportedModel, ConfigError), match="gptq"):
        load_config(str(tmp_path))


LAYER = "model.layers.0.mlp.down_proj"


def save_with_changed_part(source: Path, folder: Path, part: str, change_part: Any) -> None:
    """A GPTQ checkpoint with one part of a layer changed."""
    stored.save_stored(source, folder, "GPTQ int4, groups of 32")
    key = f"{LAYER}.{part}"
    change(folder, lambda tensors: tensors.update({key: change_part(tensors[key]).contiguous()}))


@pytest.mark.parametrize(
    ("part", "change_part", "problem"),
    [
        ("qzeros", lambda part: part | -1, rf"zero points of 0 in the format 'gptq' \(in {LAYER}\)"),
        ("qweight", lambda part: part.short(), "words of torch.int16"),
    ],
)
def test_tensors_that_the_configuration_does_not_promise_are_refused(
    source: Path, tmp_path: Path, part: str, change_part: Any, problem: str
) -> None:
    save_with_changed_part(source, tmp_path / "model", part, change_part)
    with pytest.raises(UnsupportedModel, match=f"a GPTQ checkpoint with {problem}"):
        load_model(str(tmp_path / "model"), dtype=torch.float32)


def test_a_group_without_a_scale_is_named(source: Path, tmp_path: Path) -> None:
    stored.save_stored(source, tmp_path / "model", "GPTQ int4, groups of 32")
    change(tmp_path / "model", lambda tensors: tensors[f"{LAYER}.g_idx"].add_(1))
    with pytest.raises(BrokenCheckpoint, match=f"{LAYER}.g_idx names groups without a scale"):
        load_model(str(tmp_path / "model"), dtype=torch.float32)


@pytest.mark.parametrize("keeps_index", (True, False))
@pytest.mark.parametrize("group_len", (16, 64, -1))
@pytest.mark.parametrize("name", [name for name in stored.FORMATS if "column" not in name])
def test_groups_of_another_length_than_the_configuration_s_are_refused(
    source: Path, tmp_path: Path, name: str, group_len: int, keeps_index: bool
) -> None:
    folder = tmp_path / "model"
    stored.save_stored(source, folder, name)
    settings = dict(stored.FORMATS[name][0], group_size=group_len)
    if name.startswith("compressed"):
        settings = stored.compressed_settings(group_size=group_len)
    stored.set_config(folder, quantization_config=settings)
    if not keeps_index:
        change(folder, lambda tensors: [tensors.pop(key) for key in list(tensors) if "g_idx" in key])
    with pytest.raises(BrokenCheckpoint, match=r"\d groups of scales, where config.json makes it \d+"):
        load_model(str(folder), dtype=torch.float32)


@pytest.mark.parametrize(
    ("part", "change_part", "problem"),
    [
        ("g_idx", lambda part: part[:-1], "names groups of 127 numbers, where a column has 128"),
        ("g_idx", lambda part: part.clone().fill_(0), "makes a group of 128 numbers, where config.json"),
        ("g_idx", lambda part: part.float(), "is of torch.float32"),
        ("scales", lambda part: part[:, :-1], r"is \[4, 63\], where its words make it \[4, 64\]"),
        ("qzeros", lambda part: part[:-1], r"is \[3, 8\], where its words make it \[4, 8\]"),
    ],
)
def test_parts_of_a_layer_that_do_not_fit_together_are_named(
    source: Path, tmp_path: Path, part: str, change_part: Any, problem: str
) -> None:
    save_with_changed_part(source, tmp_path / "model", part, change_part)
    with pytest.raises(BrokenCheckpoint, match=rf"{LAYER}\.{part} {problem}"):
        load_model(str(tmp_path / "model"), dtype=torch.float32)


def test_a_stored_layer_without_scales_is_named(source: Path, tmp_path: Path) -> None:
    stored.save_stored(source, tmp_path / "model", "AWQ int4, groups of 32")
    change(tmp_path / "model", lambda tensors: tensors.pop(f"{LAYER}.scales"))
    with pytest.raises(BrokenCheckpoint, match=f"{LAYER} has no scales"):
        load_model(str(tmp_path / "model"), dtype=torch.float32)


def test_a_quantised_model_of_the_hub_is_read_without_other_copies_of_its_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    stored.save_stored(source, folder, "AWQ int4, groups of 32")
    asked: dict[str, list[str]] = {}

    def snapshot_download(name: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = load_config(str(folder))
    monkeypatch.setattr(load, "load_config", lambda name: config)
    scheme = load.scheme_of(str(folder))
    monkeypatch.setattr(load, "scheme_of", lambda name: scheme)
    load_model("org/name", dtype=torch.float32)
    files = ["config.json", "model.safetensors", "consolidated.safetensors", "fp16/model.safetensors"]
    assert [*filter_repo_objects(files, **asked)] == files[:2]


def test_a_pickle_of_quantised_weights_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    stored.save_stored(source, folder, "GPTQ int4, groups of 32")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="GPTQ int4, groups of 32 in a pickle"):
        load_model(str(folder), dtype=torch.float32)


@needs_gguf
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", ("Q8_0", "Q4_0", "F16"))
def test_a_gguf_file_has_the_weights_of_its_blocks(
    source: Path, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    path = tmp_path / "model.gguf"
    weights = stored.save_gguf(source, path, kind)
    loaded = load_model(str(path), dtype=dtype).state_dict()
    assert loaded.keys() == weights.keys()
    for key, weight in weights.items():
        assert torch.equal(loaded[key], weight.to(dtype)), key
    assert stored_format(str(path)) == ("" if kind == "F16" else f"GGUF {kind}")


@needs_gguf
def test_a_file_of_the_same_name_in_the_working_directory_is_not_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked").mkdir()
    stored.save_gguf(source, tmp_path / "model.gguf", "Q4_0")
    weights = stored.save_gguf(source, tmp_path / "asked" / "model.gguf", "Q8_0")
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "asked" / "model.gguf"), "asked/model.gguf"):
        loaded = load_model(name, dtype=torch.float32).state_dict()
        assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())
        assert load_tokenizer(name)("Once")["input_ids"]


@needs_gguf
def test_a_gguf_file_has_tokenizer_end_and_sizes_of_its_own(source: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "model.gguf")
    stored.save_gguf(source, Path(path), "Q8_0")
    tokenizer = load_tokenizer(path)
    text = "Once upon a time there was a red fox named Zoë."
    assert tokenizer(text)["input_ids"] == load_tokenizer(str(source))(text)["input_ids"]
    assert end_tokens(path, load_config(path), tokenizer) == (0,)
    bundle = describe_pair(path, path, "pair", CompileConfig(), CALIBRATION_TEXT)
    assert bundle.kv_target == bundle.kv_draft
    assert [Path(known.path).name for known in bundle.sources] == ["model.gguf"] * 2


@needs_gguf
def test_other_blocks_of_gguf_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stored.save_gguf(source, path, "Q5_0")
    with pytest.raises(UnsupportedModel, match=f"{path}: a GGUF file with tensors of type Q5_0 is not"):
        load_config(str(path))


@needs_gguf
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.scale_linear", 4.0),
        ("rope.scaling.original_context_length", 64),
        ("rope.scaling.attn_factor", 1.25),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.freq_base_swa", 500.0),
        ("attention.sliding_window", 64),
        ("attention.key_length", 8),
        ("attention.value_length", 8),
        ("attention.scale", 0.5),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("embedding_scale", 12.0),
        ("logit_scale", 0.125),
        ("residual_scale", 0.22),
        ("expert_count", 8),
        ("use_parallel_residual", True),
        ("a_setting_of_tomorrow", 3),
    ],
)
def test_settings_that_the_reader_would_drop_are_refused(
    source: Path, tmp_path: Path, key: str, value: str | float
) -> None:
    path = tmp_path / "model.gguf"
    stored.save_gguf(source, path, "Q8_0", **{f"llama.{key}": value})
    with pytest.raises(UnsupportedModel, match=f"a GGUF file with llama.{key} = {value!r} is not"):
        load_config(str(path))


@needs_gguf
@pytest.mark.parametrize(
    "settings",
    [
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 0.0, "rope.scale_linear": 1.0},
        {"attention.sliding_window": 0},
        {"attention.sliding_window": 1 << 20},
        {"attention.key_length": 16, "attention.value_length": 16, "attention.scale": 0.25},
        {"attention.scale": 0.0, "attention.causal": True, "expert_count": 0, "logit_scale": 1.0},
        {"rope.scaling.original_context_length": 1 << 20, "rope.scaling.finetuned": True},
        {"use_parallel_residual": False, "final_logit_softcapping": 0.0, "tensor_data_layout": "usual"},
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_read(
    source: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    stored.save_gguf(source, path, "Q8_0", **{f"llama.{key}": value for key, value in settings.items()})
    load_config(str(path))


@needs_gguf
@pytest.mark.parametrize(
    ("architecture", "settings", "found"),
    [
        ("nemotron", {}, "rope.dimension_count = 16"),
        ("qwen3", {}, "rope.dimension_count = 16"),
        ("starcoder2", {}, "attention.layer_norm_rms_epsilon = 1e-06"),
        ("gemma3", {"attention.key_length": 16}, r"attention.scale = 0.25 \(absent\)"),
        ("gpt2", {}, "attention.head_count_kv = 2"),
    ],
)
def test_defaults_of_an_architecture_in_place_of_a_file_s_settings_are_refused(
    source: Path, tmp_path: Path, architecture: str, settings: dict[str, Any], found: str
) -> None:
    path = tmp_path / "model.gguf"
    named = {f"{architecture}.{key}": value for key, value in settings.items()}
    stored.save_gguf(source, path, "Q8_0", architecture=architecture, **named)
    with pytest.raises(UnsupportedModel, match=f"a GGUF file with {architecture}.{found} is not"):
        load_config(str(path))


@needs_gguf
@pytest.mark.parametrize(("key", "value"), [("general.type", "adapter"), ("split.count", 2)])
def test_a_gguf_file_without_a_whole_model_is_refused(
    source: Path, tmp_path: Path, key: str, value: str | int
) -> None:
    path = tmp_path / "model.gguf"
    stored.save_gguf(source, path, "Q8_0", **{key: value})
    with pytest.raises(UnsupportedModel, match=f"a GGUF file with {key} = {value!r} is not"):
        load_config(str(path))


@needs_gguf
@pytest.mark.parametrize(
    ("split", "settings", "found"),
    [
        ("", {}, "pre = None"),
        ("default", {}, "pre = 'default'"),
        ("smollm", {}, "pre = 'smollm'"),
        ("llama-bpe", {"bos_token_id": 0}, r"add_bos_token = True \(absent\)"),
        ("lfm2", {"bos_token_id": 0}, r"add_bos_token = True \(absent\)"),
    ],
)
def test_texts_that_the_reader_would_tokenize_otherwise_are_refused(
    source: Path, tmp_path: Path, split: str, settings: dict[str, Any], found: str
) -> None:
    path = str(tmp_path / "model.gguf")
    named = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    stored.save_gguf(source, Path(path), "Q8_0", split=split, **named)
    with pytest.raises(UnsupportedModel, match=rf"a GGUF file with tokenizer\.ggml\.{found} is not"):
        describe_pair(path, None, "pair", TINY, CALIBRATION_TEXT)


@needs_gguf
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bos_token_id": 0},
        {"bos_token_id": 0, "add_bos_token": True, "add_eos_token": True},
        {"bos_token_id": 0, "add_bos_token": False},
    ],
    ids=str,
)
def test_a_tokenizer_begins_and_ends_a_text_as_its_file_asks(
    source: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = str(tmp_path / "model.gguf")
    named = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    stored.save_gguf(source, Path(path), "Q8_0", **named)
    tokenizer = load_tokenizer(path)
    gguf.check_tokenizer(path, tokenizer)
    around = [settings.get(name, False) for name in ("add_bos_token", "add_eos_token")]
    assert tokenizer("a")["input_ids"].count(0) == sum(around)


@needs_gguf
@pytest.mark.parametrize(("split", "is_whole"), [("gpt-2", False), ("llama-bpe", True), ("lfm2", True)])
def test_a_word_of_the_vocabulary_is_not_merged_from_parts_where_its_tokenizer_takes_whole_words(
    source: Path, tmp_path: Path, split: str, is_whole: bool
) -> None:
    path = str(tmp_path / "model.gguf")
    stored.save_gguf(source, Path(path), "Q8_0", split=split)
    tokenizer = load_tokenizer(path)
    unmerged = [
        word
        for word, token in tokenizer.get_vocab().items()
        if word.isascii()
        and word.isalpha()
        and tokenizer(word, add_special_tokens=False)["input_ids"] != [token]
    ]
    assert tokenizer.backend_tokenizer.model.ignore_merges is is_whole
    assert not (is_whole and unmerged)


@needs_gguf
def test_a_tensor_of_gguf_without_a_place_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    monkeypatch.setitem(stored.NAMES, "rope_freqs", "rope_freqs")
    folder = tmp_path / "source"
    stored.shutil.copytree(source, folder)
    change(folder, lambda tensors: tensors.update({"rope_freqs.weight": torch.ones(8)}))
    stored.save_gguf(folder, path, "Q8_0")
    with pytest.raises(UnsupportedModel, match="a GGUF file with 22 tensors for a model of 21"):
        load_model(str(path), dtype=torch.float32)


@needs_gguf
@pytest.mark.parametrize("kept", (3, 100, -40))
def test_a_gguf_file_that_ends_early_is_named(source: Path, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.gguf"
    stored.save_gguf(source, path, "Q8_0")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BrokenCheckpoint, match=f"{path}: no whole GGUF file"):
        load_config(str(path))


@needs_gguf
def test_an_architecture_that_the_reader_does_not_know_is_named(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stored.save_gguf(source, path, "Q8_0", architecture="unheard_of")
    with pytest.raises(ConfigError, match=r"a GGUF file that it reads.*architecture unheard_of"):
        load_config(str(path))


def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "find_spec", lambda package: None if package == "gguf" else object())
    with pytest.raises(
        ConfigError, match=r"reading GGUF needs gguf; pip install 'yggdrasil-decoding\[gguf\]'"
    ):
        load_config(str(tmp_path / "model.gguf"))


@needs_gguf
def test_the_sampling_that_a_gguf_file_asks_for_is_the_default_of_requests(
    source: Path, tmp_path: Path
) -> None:
    asked = {"temp": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.0}
    path = str(tmp_path / "model.gguf")
    stored.save_gguf(source, Path(path), "Q8_0", **{f"general.sampling.{key}": asked[key] for key in asked})
    assert request_defaults(path, 128) == {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    assert unapplied_defaults(path) == ""


@needs_gguf
def test_a_negative_top_k_of_a_gguf_file_is_off_as_in_llama_cpp(source: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "model.gguf")
    asked = {"general.sampling.temp": 0.7, "general.sampling.top_k": -1}
    stored.save_gguf(source, Path(path), "Q8_0", **asked)
    assert request_defaults(path, 128) == {"temperature": 0.7, "top_k": 0}


@needs_gguf
def test_a_gguf_file_that_asks_for_greedy_text_or_for_nothing_sets_no_default(
    source: Path, tmp_path: Path
) -> None:
    for name, asked in (("greedy", {"general.sampling.temp": 0.0}), ("open", {})):
        path = str(tmp_path / f"{name}.gguf")
        stored.save_gguf(source, Path(path), "Q8_0", **asked)
        assert request_defaults(path, 128) == {}


@needs_gguf
def test_sampling_of_a_gguf_file_that_is_not_applied_is_named(source: Path, tmp_path: Path) -> None:
    asked = {"temp": 0.7, "penalty_repeat": 1.1, "mirostat": 2}
    path = str(tmp_path / "model.gguf")
    stored.save_gguf(source, Path(path), "Q8_0", **{f"general.sampling.{key}": asked[key] for key in asked})
    found = "the target sets general.sampling.mirostat=2, general.sampling.penalty_repeat=1.1: not applied"
    assert unapplied_defaults(path).startswith(found)


@needs_gguf
def test_sampling_of_a_gguf_file_that_is_not_allowed_is_refused(source: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "model.gguf")
    for name, value, shown in (("top_p", 1.5, r"1\.5"), ("top_k", "many", "'many'")):
        asked = {"general.sampling.temp": 0.7, f"general.sampling.{name}": value}
        stored.save_gguf(source, Path(path), "Q8_0", **asked)
        with pytest.raises(BrokenCheckpoint, match=f"sampling: {name}: {shown} is not allowed"):
            request_defaults(path, 128)
