"""Pages on a CPU hold keys word by word and values pair by pair.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import pytest
import torch

from yggdrasil.layout import PAGE_LEN
from yggdrasil.page_order import by_slot, in_pages


def numbered(dtype: torch.dtype) -> torch.Tensor:
    """A page of one head with 4 features, slot after slot: keys 0 to 63, values 64 to 127."""
    return torch.arange(2.0 * PAGE_LEN * 4).view(1, 1, 2, 1, PAGE_LEN, 4).to(dtype)


def test_in_bfloat16_a_word_has_two_features_of_a_key_or_one_of_two_values() -> None:
    keys, values = in_pages(numbered(torch.bfloat16)).flatten(3).squeeze().tolist()
    assert keys[:6] == [0, 1, 4, 5, 8, 9]  # features 0 and 1 of three slots
    assert keys[32:36] == [2, 3, 6, 7]
    assert values[:8] == [64, 68, 65, 69, 66, 70, 67, 71]  # slots 0 and 1 in turns
    assert values[8:10] == [72, 76]


def test_in_float32_keys_are_transposed_and_values_are_not() -> None:
    keys, values = in_pages(numbered(torch.float32)).flatten(3).squeeze().tolist()
    assert keys[:3] == [0, 4, 8]
    assert keys[16:18] == [1, 5]
    assert values == list(range(64, 128))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_by_slot_undoes_the_order(dtype: torch.dtype) -> None:
    slots_PL2GSF = torch.randn(3, 2, 2, 5, PAGE_LEN, 32).to(dtype)
    pages_PL2GSF = in_pages(slots_PL2GSF)
    assert not torch.equal(pages_PL2GSF, slots_PL2GSF)
    assert torch.equal(by_slot(pages_PL2GSF), slots_PL2GSF)
