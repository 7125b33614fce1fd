"""Grafts in C++ against their specification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.kernels.grafting import graft
from yggdrasil.text.repeats import Repeats

pytestmark = pytest.mark.usefixtures("kernels")


@given(
    st.lists(st.one_of(st.integers(0, 2), st.integers(0, 4000)), max_size=200),
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20), st.floats(0, 1)), max_size=12),
)
def test_both_forms_find_the_same_chain_and_count_the_same_evidence(
    tokens: list[int], prompt_len: int, steps: list[tuple[int, int, float]]
) -> None:
    reference = Repeats(prompt_len)
    compiled = Repeats(prompt_len)
    end = 0
    for gained, most, min_edge in steps:
        end = min(end + gained, len(tokens))
        for each in (reference, compiled):
            each.follow_(tokens[:end])
        assert graft(compiled, most, min_edge) == reference.graft(most, min_edge)
        assert bytes(compiled.evidence) == bytes(reference.evidence)
