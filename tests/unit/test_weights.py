"""The weight file: safetensors whose tensors begin at cache lines, whatever their sizes are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from yggdrasil import build
from yggdrasil.compiler.weights import ALIGNMENT, FILE_NAME, has_weights, load_weights, save_weights
from yggdrasil.errors import ArtifactError


class Odd(nn.Module):
    """Sizes that are no multiples of a cache line, several dtypes, a scalar, nothing at all, and a tied pair."""

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


def test_every_tensor_begins_at_a_cache_line_and_comes_back_as_it_was(tmp_path: Path) -> None:
    model = Odd()
    save_weights(model, tmp_path)
    loaded = load_weights(tmp_path, "cpu", "ygg compile")
    expected = {f"model.{name}": tensor for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].data_ptr() % ALIGNMENT == 0, name
    assert loaded["model.tied"].data_ptr() == loaded["model.weight"].data_ptr()


@pytest.mark.parametrize("name_len", range(8))
def test_the_length_of_the_header_moves_no_tensor(name_len: int, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("x" * (1 + 9 * name_len), torch.arange(5))
    save_weights(model, tmp_path)
    [tensor] = load_weights(tmp_path, "cpu", "ygg compile").values()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert tensor.data_ptr() % ALIGNMENT == 0


def test_any_reader_of_safetensors_reads_the_file(tmp_path: Path) -> None:
    model = Odd()
    save_weights(model, tmp_path)
    with safe_open(tmp_path / FILE_NAME, framework="pt") as file:
        assert torch.equal(file.get_tensor("model.weight"), model.weight)
        assert file.metadata() == {"model.tied": "model.weight"}


def test_a_file_that_is_not_aligned_is_refused(tmp_path: Path) -> None:
    save_file({"model.first": torch.zeros(3, dtype=torch.uint8), "model.second": torch.zeros(40)}, tmp_path / FILE_NAME)
    with pytest.raises(ArtifactError, match=r"does not begin at a multiple of 64 bytes; run `ygg compile`"):
        load_weights(tmp_path, "cpu", "ygg compile")
    assert not has_weights(tmp_path)


def test_weights_are_there_only_when_they_load(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    save_weights(Odd(), tmp_path)
    assert has_weights(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    assert not has_weights(tmp_path)


def test_compiling_again_packs_weights_that_do_not_load_and_keeps_those_that_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(build, "load_model", lambda model, dtype: packed.append(model) or Odd())
    bundle = SimpleNamespace(config=SimpleNamespace(dtype="bfloat16", device="cpu"))
    for _ in range(2):
        build._pack(bundle, tmp_path, "one", 0, 1)  # type: ignore[arg-type]
    (tmp_path / FILE_NAME).write_bytes(b"truncated")
    build._pack(bundle, tmp_path, "another", 0, 1)  # type: ignore[arg-type]
    assert packed == ["one", "another"]
    assert has_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
