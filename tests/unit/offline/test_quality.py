"""What rounding changes is measured on the same tokens before and after it.

Shapes: L = tokens of a text.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from yggdrasil.models.attention import IMPLEMENTATION
from yggdrasil.offline import quality as module
from yggdrasil.offline.quality import losses, quality, token_texts


class Uniform:
    """A model of four tokens that are equally likely."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(_attn_implementation=IMPLEMENTATION)
        self.read: list[int] = []

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert self.config._attn_implementation == "eager"
        self.read.append(input_ids.shape[1])
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 4))


def test_the_loss_of_a_text_is_the_sum_over_its_tokens_but_the_first() -> None:
    texts = [torch.tensor([0, 1, 2]), torch.tensor([3, 3])]
    assert losses(Uniform(), texts) == pytest.approx([2 * math.log(4), math.log(4)])


def test_at_least_one_text_is_read_in_any_time() -> None:
    model = Uniform()
    texts = [torch.tensor([0, 1, 2])] * 5
    assert len(losses(model, texts, most_seconds=0.0)) == len(model.read) == 1
    assert model.config._attn_implementation == IMPLEMENTATION


def test_a_ratio_is_that_of_the_perplexities() -> None:
    texts = [torch.tensor([0, 1, 2]), torch.tensor([3, 3]), torch.tensor([0] * 50)]
    found = quality([2 * math.log(4), math.log(4)], [2 * math.log(5), math.log(5)], texts)
    assert found == {"perplexity": pytest.approx(5.0), "ratio": pytest.approx(1.25), "tokens": 3}


def test_tokens_without_an_embedding_and_texts_of_one_token_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = {"a": [1, 9, 2], "b": [3], "c": [8, 9]}
    monkeypatch.setattr(module, "load_tokenizer", lambda model: lambda text: {"input_ids": tokens[text]})
    assert [text_L.tolist() for text_L in token_texts("model", list(tokens), vocab=8)] == [[1, 2]]
