"""The weight file: what is written comes back, and what does not load is written again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from yggdrasil import build
from yggdrasil.compiler.weights import FILE_NAME, has_weights, load_weights, save_weights


class Odd(nn.Module):
    """Odd sizes, several dtypes, a scalar, nothing at all, and a tied pair."""

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


def test_every_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    model = Odd()
    save_weights(model, tmp_path)
    loaded = load_weights(tmp_path, "cpu", "ygg compile")
    expected = {f"model.{name}": tensor for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert loaded["model.tied"].data_ptr() == loaded["model.weight"].data_ptr()


def test_weights_are_there_only_when_they_load(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    save_weights(Odd(), tmp_path)
    assert has_weights(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    assert not has_weights(tmp_path)


def test_compiling_again_packs_weights_that_do_not_load_and_keeps_those_that_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, proved = [], []
    monkeypatch.setattr(build, "load_model", lambda model, dtype: packed.append(model) or Odd())
    monkeypatch.setattr(build, "kv_shape", lambda config, capacity: None)
    monkeypatch.setattr(build, "expected_passages", lambda model, *others: [model])
    monkeypatch.setattr(build, "check_forward", lambda model, loaded, kv, passages, num_positions: proved.append((model, passages)))
    config = SimpleNamespace(device="cpu", compress=False, path_depth=5)
    bundle = SimpleNamespace(config=config, dtype=torch.bfloat16, models=("one", "another"), vocab=384, max_context=128)
    for _ in range(2):
        build._pack(bundle, tmp_path, 0, 0, 1)  # type: ignore[arg-type]
    (tmp_path / FILE_NAME).write_bytes(b"truncated")
    build._pack(bundle, tmp_path, 1, 0, 1)  # type: ignore[arg-type]
    assert packed == ["one", "another"]
    assert proved == [("one", ["one"]), ("another", ["another"])]  # once for all runs that find the weights
    assert has_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
