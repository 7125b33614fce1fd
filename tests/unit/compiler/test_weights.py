"""The weight file: it loads as it was saved, and is as readable as its folder."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_pair
import torch
from safetensors import safe_open
from torch import nn

from yggdrasil.compiler import weights
from yggdrasil.compiler.weights import FILE_NAME, Lender, load_weights, save_weights
from yggdrasil.errors import ArtifactError, UnsupportedModel
from yggdrasil.offline import build


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapped file at `address`, as Linux reports them."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if limits := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(limits[1], 16) <= address < int(limits[2], 16)
        elif is_here and line.startswith("FilePmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0


def pages_in_memory(path: Path) -> int:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    flags = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), flags) == 0
    return sum(flags)


def has_large_folios(path: Path) -> bool:
    """Whether a file that is read in order, from a mapping that asks, has huge pages here."""
    path.write_bytes(bytes(2**23))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(mapped, dtype=np.uint8)
    assert numbers.sum() == 0
    return huge_bytes(numbers.ctypes.data) > 0


class Odd(nn.Module):
    """Odd sizes, several dtypes, a scalar, an empty tensor, and a tied pair."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3).bfloat16())
        self.weight = nn.Parameter(torch.randn(5, 7).bfloat16())
        self.tied = self.weight
        for name, buffer in {
            "scale": torch.tensor(0.5),
            "mask": torch.tensor([True, False, True]),
            "ids": torch.arange(9),
            "empty": torch.empty(0, 4),
            "whole": torch.randn(4, 16),
            "transposed": torch.randn(6, 11).T,
        }.items():
            self.register_buffer(name, buffer)


def test_every_tensor_loads_as_it_was_saved(tmp_path: Path) -> None:
    model = Odd()
    save_weights(model, tmp_path)
    loaded = load_weights(tmp_path, "cpu", "ygg compile")
    expected = {
        f"model.{name}": tensor
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert loaded["model.tied"].data_ptr() == loaded["model.weight"].data_ptr()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_written_file_leaves_memory(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(2**20))
    with other.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(other):
        pytest.skip("this file system keeps files in memory")
    save_weights(Odd(), tmp_path)
    assert pages_in_memory(tmp_path / FILE_NAME) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_file_is_read_whole_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    model.register_buffer("big", torch.arange(2**22))
    save_weights(model, tmp_path)
    path = tmp_path / FILE_NAME
    monkeypatch.setattr(weights, "READ_BYTES", 2**23 + mmap.PAGESIZE)
    load_weights(tmp_path, "cpu", "")
    assert pages_in_memory(path) == -(-path.stat().st_size // mmap.PAGESIZE)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("read_bytes", (weights.READ_BYTES, 2**20))
def test_loaded_weights_have_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(weights, "READ_BYTES", read_bytes)
    if not has_large_folios(tmp_path / "other"):
        pytest.skip("this file system has no large folios")
    model = nn.Module()
    model.register_buffer("big", torch.arange(2**20))
    save_weights(model, tmp_path)
    big = load_weights(tmp_path, "cpu", "")["model.big"]
    assert torch.equal(big, model.big)
    assert huge_bytes(big.data_ptr() + big.nbytes // 2) >= big.nbytes // 2


def test_tensors_that_another_file_has_are_named_and_not_written(tmp_path: Path) -> None:
    model = Odd()
    (tmp_path / "target").mkdir()
    (tmp_path / "draft").mkdir()
    save_weights(model, tmp_path / "target")
    model.whole[0, 0] += 1  # type: ignore[operator, index]
    model.renamed = nn.Parameter(model.bias.detach().clone())
    names = {"renamed": "bias", "bias": "none"}
    lender = Lender(tmp_path / "target", lambda name: names.get(name, name))
    save_weights(model, tmp_path / "draft", lender)
    with safe_open(tmp_path / "draft" / FILE_NAME, framework="pt") as file:
        assert set(file.keys()) == {"model.whole", "model.bias"}
    loaded = load_weights(tmp_path / "draft", "cpu", "ygg compile")
    expected = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert loaded.keys() == {f"model.{name}" for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(loaded[f"model.{name}"], tensor), name
    assert loaded["model.tied"].data_ptr() == loaded["model.weight"].data_ptr()
    (tmp_path / "target" / FILE_NAME).unlink()
    with pytest.raises(ArtifactError, match=r"target/weights\.safetensors: missing; run `ygg compile`"):
        load_weights(tmp_path / "draft", "cpu", "ygg compile")


def packing(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A bundle with `Odd` as its models, and a list of the models whose forward was checked."""
    proved: list[Any] = []
    monkeypatch.setattr(build, "load_model", lambda model, dtype: Odd())
    monkeypatch.setattr(build, "kv_shape", lambda config, capacity: None)
    monkeypatch.setattr(build, "expected_passages", lambda model, *others: [model])
    monkeypatch.setattr(
        build,
        "check_forward",
        lambda model, loaded, kv, passages, num_positions: proved.append((model, passages)),
    )
    config = SimpleNamespace(device="cpu", compress=False, path_depth=5)
    models = ("one", "another")
    bundle = SimpleNamespace(config=config, dtype=torch.bfloat16, models=models, vocab=384, max_context=128)
    return bundle, proved


def test_weights_are_as_readable_as_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = packing(monkeypatch)
    for mode, expected in ((0o755, 0o644), (0o700, 0o600), (0o777, 0o644)):
        tmp_path.chmod(mode)
        build._pack(bundle, build.Part("one", tmp_path, "bf16"), [], tiny_pair.SilentProgress())
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == expected


def test_a_forward_is_checked_before_its_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, proved = packing(monkeypatch)
    for name in bundle.models:
        build._pack(bundle, build.Part(name, tmp_path, "bf16"), [], tiny_pair.SilentProgress())
    assert proved == [("one", ["one"]), ("another", ["another"])]

    def refuse(*given: Any) -> None:
        raise UnsupportedModel("one", "another forward")

    monkeypatch.setattr(build, "check_forward", refuse)
    with pytest.raises(UnsupportedModel):
        build._pack(bundle, build.Part("one", tmp_path / "refused", "bf16"), [], tiny_pair.SilentProgress())
    assert not (tmp_path / "refused").exists()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_an_error_names_the_damaged_file_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: missing; run `ygg compile`"):
        load_weights(tmp_path, "cpu", "ygg compile")
    (tmp_path / FILE_NAME).write_bytes(b"truncated")
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: corrupt .*; run `ygg compile`"):
        load_weights(tmp_path, "cpu", "ygg compile")
