"""The inputs of a compilation: fingerprints, and the checks before anything is built."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_pair
import torch
from conftest import TINY

from yggdrasil import kernels
from yggdrasil.bundle import NOT_IN_GRAPHS, Bundle, graph_sources, is_compiled, read_bundle
from yggdrasil.config import CompileConfig
from yggdrasil.errors import ArtifactError, BrokenCheckpoint, ConfigError, ModelMismatch, UnsupportedModel
from yggdrasil.models.load import check_vocabularies, shared_vocab
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.offline import build, inputs
from yggdrasil.offline.inputs import common_ids, describe_pair, max_context, source_files
from yggdrasil.offline.traces import CALIBRATION_TEXT, beginnings
from yggdrasil.store import artifacts
from yggdrasil.text.tokenizer import Tokenizer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama_folders: tuple[str, str]) -> dict[str, str]:
    """A hub with one model, `org/draft`, as it lies in the cache of transformers; its commit is under that
    key.
    """
    commits = {"org/draft": "1" * 40}
    load_config = inputs.load_config
    load_tokenizer(llama_folders[0])  # imports what takes `cached_file` by name, before it is replaced
    monkeypatch.setattr(
        inputs, "load_config", lambda name: load_config(llama_folders[1] if name in commits else name)
    )
    monkeypatch.setattr(
        inputs, "load_tokenizer", lambda name: load_tokenizer(llama_folders[1] if name in commits else name)
    )
    monkeypatch.setattr(inputs, "stored_format", lambda name: "")
    monkeypatch.setattr(
        "transformers.utils.hub.cached_file",
        lambda name, file: str(tmp_path / "snapshots" / commits[name] / file),
    )
    return commits


@pytest.fixture
def described(llama_folders: tuple[str, str]) -> Bundle:
    """The bundle of the Llama pair before it is built."""
    return describe_pair(*llama_folders, "pair", TINY, CALIBRATION_TEXT)


def fingerprint(target: str, draft: str) -> str:
    return describe_pair(target, draft, "pair", TINY, CALIBRATION_TEXT).folder.name


def test_a_new_commit_of_a_hub_draft_is_another_pair(
    hub: dict[str, str], llama_folders: tuple[str, str]
) -> None:
    before = fingerprint(llama_folders[0], "org/draft")
    assert fingerprint(llama_folders[0], "org/draft") == before
    hub["org/draft"] = "2" * 40
    assert fingerprint(llama_folders[0], "org/draft") != before != fingerprint(*llama_folders)


def test_model_files_of_an_earlier_build_are_not_read_again(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "digest_file", lambda path: pytest.fail(f"{path} was read"))
    target, draft = source_files(tiny_bundle.models, "tiny", lambda: None)
    assert (*target, *draft) == tiny_bundle.sources


def test_exchanged_models_are_another_pair(llama_folders: tuple[str, str]) -> None:
    assert fingerprint(*llama_folders) != fingerprint(*reversed(llama_folders))  # type: ignore[arg-type]


def test_workers_on_cuda_are_limited_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: Bundle
) -> None:
    shard_bytes = 3000
    draft_bytes = 1000
    config = replace(TINY, device="cuda", ranks=2)
    bundle = replace(described, folder=tmp_path, config=config)
    for folder, size in (
        (bundle.target_weights(0), shard_bytes),
        (bundle.target_weights(1), shard_bytes),
        (tmp_path / "draft", draft_bytes),
    ):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(bytes(size))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    free = 5 * (build.WORKER_BYTES + shard_bytes + draft_bytes)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free, 10 * free))
    assert build._num_workers(bundle, None) == 5
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free - 1, 10 * free))
    assert build._num_workers(bundle, None) == 4
    assert build._num_workers(bundle, 3) == 3


@pytest.mark.parametrize(("asked", "flags", "width", "expected"), [
    (None, "avx512f amx_bf16", 2048, True),
    (None, "avx512f amx_bf16", 64, False),
    (None, "avx512f", 2048, False),
    (True, "avx2", 64, True),
    (False, "avx512f amx_bf16", 2048, False),
])  # fmt: skip
def test_large_models_are_compressed_on_amx_and_others_on_request(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, flags: str, width: int, expected: bool
) -> None:
    monkeypatch.setattr(artifacts, "cpu_flags", lambda: flags)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, dtype=torch.bfloat16, device="meta") for _ in range(2))
    )
    assert build.compresses(CompileConfig(compress=asked), model) == expected
    assert not build.compresses(CompileConfig(dtype="float32"), model)


def test_profiles_of_two_gpus_are_two_files(monkeypatch: pytest.MonkeyPatch, described: Bundle) -> None:
    assert described.profile_path.stem == artifacts.machine_name()
    on_gpu = replace(described, config=replace(TINY, device="cuda"))
    paths = set()
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        paths |= {on_gpu.profile_path, on_gpu.plan_path, described.profile_path}
    assert len(paths) == 5


def test_graph_sources_include_every_operator_that_a_graph_calls() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in graph_sources()}
    assert names >= {
        "yggdrasil/layout.py",
        "yggdrasil/kv.py",
        "yggdrasil/page_order.py",
        "compiler/workers.py",
        "compiler/weights.py",
        "compiler/model.py",
        "models/forward.py",
    }
    assert names >= {
        "kernels/attention.cpp",
        "kernels/operators.h",
        "kernels/vectors.h",
        "kernels/linear_triton.py",
        "kernels/build.py",
    }
    assert names.isdisjoint({"kernels/commit_triton.py", "kernels/migrate.py", "kernels/migrate_triton.py"})
    folder = Path(kernels.__file__).parent
    assert [name for name in NOT_IN_GRAPHS if not (folder / name).exists()] == []


def test_different_tokenizers_are_refused_with_the_first_token_that_differs(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    tokenizer = load_tokenizer(llama_folders[0])
    assert common_ids(tokenizer, llama_folders[1], tiny_pair.VOCAB) == tiny_pair.VOCAB
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        ModelMismatch, match=r"tokenizer: token 384 differs: the target has none, the draft has '<\|new\|>'"
    ):
        common_ids(load_tokenizer(llama_folders[0]), str(tmp_path), tiny_pair.VOCAB + 1)
    # an id without an embedding in the target stands for nothing
    assert common_ids(load_tokenizer(llama_folders[0]), str(tmp_path), tiny_pair.VOCAB) == tiny_pair.VOCAB


def test_a_calibration_text_without_two_tokens_is_refused_by_its_path(
    llama_folders: tuple[str, str],
) -> None:
    tokenizer = Tokenizer(Path(llama_folders[0]) / "tokenizer.json", "ygg compile")
    with pytest.raises(
        ConfigError,
        match=r"calibration: '.*calibration\.jsonl' .*; ygg compile TARGET DRAFT --calibration FILE",
    ):
        beginnings(["O"], tokenizer, "")


def test_another_calibration_budget_keeps_the_graphs() -> None:
    assert replace(TINY, calibration_budget_s=30.0).lowering == TINY.lowering


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("num_positions", (-5, 8, 35))
@pytest.mark.parametrize("model", ("target", "draft"))
def test_a_model_with_too_few_positions_is_refused_by_name(model: str, num_positions: int) -> None:
    models = {"target": SimpleNamespace(), "draft": SimpleNamespace()}
    models[model].max_position_embeddings = num_positions
    config = replace(TINY, max_context=None)
    with pytest.raises(UnsupportedModel, match=f"{model}: a context of {num_positions} positions"):
        max_context(config, models)
    models[model].max_position_embeddings = 32 + config.path_depth
    assert max_context(config, models) == 32


def test_a_calibration_of_single_tokens_is_refused_before_anything_is_built(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    texts = tmp_path / "short.txt"
    texts.write_text("O\n\nO")
    with pytest.raises(ConfigError, match=f"calibration: '{texts}' .*at least one text of two tokens"):
        describe_pair(*llama_folders, "pair", TINY, texts)
    texts.write_text("O\n\nOnce upon a time")
    assert describe_pair(*llama_folders, "pair", TINY, texts).calibration == str(texts)


def test_cuda_without_a_device_is_refused_with_a_command(llama_folders: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="device: 'cuda' .*; ygg compile TARGET DRAFT --device cpu"):
        describe_pair(*llama_folders, "pair", replace(TINY, device="cuda"), CALIBRATION_TEXT)


def test_vocabularies_may_differ_by_ids_that_the_tokenizer_lacks(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    padded = tiny_pair.save_padded(llama_folders[0], tmp_path / "padded", 400)
    assert (
        fingerprint(padded, llama_folders[1])
        != fingerprint(llama_folders[0], padded)
        != fingerprint(*llama_folders)
    )
    (tmp_path / "padded" / "tokenizer.json").unlink()
    (tmp_path / "padded" / "tokenizer_config.json").unlink()
    with pytest.raises(
        ModelMismatch, match="vocabulary size differs: the target has 384 tokens, the draft has 400 tokens"
    ):
        fingerprint(llama_folders[0], padded)  # nothing tells what its ids mean


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused() -> None:
    sizes = SimpleNamespace(vocab_size=400), SimpleNamespace(vocab_size=384)
    check_vocabularies(*sizes, 384)
    with pytest.raises(ModelMismatch, match="the target has 400 tokens, the draft has 384 tokens"):
        check_vocabularies(*sizes, 385)
    assert shared_vocab(*sizes) == 384


def test_an_unreadable_pair_is_not_reported_as_unknown(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def closed(path: Any, **options: Any) -> os.stat_result:
        if Path(path).name == "current.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", closed)
        patched.setattr("os.stat", closed)
        assert is_compiled("tiny")
        with pytest.raises(
            ArtifactError, match=r"current\.json: cannot be read .permission denied.; run `chmod a\+rX "
        ):
            read_bundle("tiny")
    assert not is_compiled("nobody")
    assert not is_compiled("x" * 300)
    assert not is_compiled("nul\0")


def with_tokens(folder: str, copy: Path, tokens: list[str], *, special: bool) -> str:
    """The model with tokens of its tokenizer that its embeddings have no row for."""
    shutil.copytree(folder, copy)
    tokenizer = load_tokenizer(str(copy))
    tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.save_pretrained(copy)
    return str(copy)


def test_special_tokens_without_an_embedding_are_a_note(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    folders = [
        with_tokens(folder, tmp_path / name, ["[PAD]"], special=True)
        for folder, name in zip(llama_folders, ("target", "draft"), strict=True)
    ]
    bundle = describe_pair(*folders, "pair", TINY, CALIBRATION_TEXT)  # type: ignore[arg-type]
    assert bundle.vocab == tiny_pair.VOCAB
    assert bundle.notes == (
        "the target has no embedding for special tokens of its tokenizer: '[PAD]' (384); "
        "a prompt that contains one is refused",
    )


def test_words_without_an_embedding_are_refused(tmp_path: Path, llama_folders: tuple[str, str]) -> None:
    folders = [
        with_tokens(folder, tmp_path / name, ["blob", "gizmo"], special=False)
        for folder, name in zip(llama_folders, ("target", "draft"), strict=True)
    ]
    with pytest.raises(
        BrokenCheckpoint,
        match=r"2 tokens of its tokenizer have no embedding, the first is 'blob' \(384\); the model has ",
    ):
        describe_pair(*folders, "pair", TINY, CALIBRATION_TEXT)  # type: ignore[arg-type]


def test_special_tokens_that_the_draft_alone_lacks_are_a_mismatch() -> None:
    with pytest.raises(ModelMismatch, match="the target has 385 tokens, the draft has 384 tokens"):
        # the target may write what the draft cannot read
        check_vocabularies(SimpleNamespace(vocab_size=385), SimpleNamespace(vocab_size=384), 385)


def test_defaults_of_requests_and_end_tokens_come_from_the_model(
    tmp_path: Path, llama_folders: tuple[str, str]
) -> None:
    target = Path(shutil.copytree(llama_folders[0], tmp_path / "target"))
    settings = {"repetition_penalty": 1.2, "num_beams": 4}
    (target / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    bundle = describe_pair(str(target), llama_folders[1], "pair", TINY, CALIBRATION_TEXT)
    assert bundle.eos_tokens == (7, 9, 0)
    assert bundle.defaults == {"repetition_penalty": 1.2}
    assert ["num_beams=4" in note for note in bundle.notes] == [True]


def test_a_bundle_comes_back_with_its_vocabulary_and_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_folders: tuple[str, str]
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    bundle = replace(
        describe_pair(*llama_folders, "pair", TINY, CALIBRATION_TEXT),
        notes=("one", "two"),
        defaults={"top_k": 5},
    )
    bundle.save()
    assert read_bundle("pair") == bundle
    path = bundle.folder / "bundle.json"
    payload = artifacts.load_json(path, "")
    del payload["vocab"]
    artifacts.save_json(path, {**payload, "machine": {**payload["machine"], "format": 6}})
    with pytest.raises(ArtifactError, match="stale: format was 6 and is now"):
        read_bundle("pair")
