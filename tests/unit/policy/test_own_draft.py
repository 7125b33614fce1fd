"""The choice among drafts that can be made from the target, with numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from yggdrasil.policy.own_draft import DraftCandidate, OwnDraft, accepted_lengths, chain_speedup

QUICK = DraftCandidate("int4", (0, 3), 0.9, 0.1, 2.5)
WHOLE = DraftCandidate("int8", (0, 1, 2, 3), 0.99, 0.5, 1.8)


def test_accepted_lengths_count_agreement_in_a_row() -> None:
    agrees = [np.array([True, True, False, True]), np.array([True])]
    assert accepted_lengths(agrees, 3).tolist() == [4 / 5, 1 / 3, 0.0]


def test_texts_that_are_too_short_for_a_depth_accept_nothing_there() -> None:
    assert accepted_lengths([np.array([True, True])], 4).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert accepted_lengths([], 2).tolist() == [0.0, 0.0]


def test_the_speedup_is_that_of_the_best_chain() -> None:
    accepted_D = np.array([0.8, 0.6, 0.1])
    assert chain_speedup(accepted_D, 0.2) == pytest.approx(2.4 / 1.4)  # of two tokens
    assert chain_speedup(accepted_D, 0.5) == pytest.approx(1.8 / 1.5)  # of one
    assert chain_speedup(accepted_D, 0.9) == 1.0  # plain decoding


def test_the_quickest_candidate_is_chosen_and_of_equals_the_first() -> None:
    assert OwnDraft((WHOLE, QUICK), 4).chosen == QUICK
    slower = replace(QUICK, speedup=WHOLE.speedup)
    assert OwnDraft((slower, WHOLE), 4).chosen == slower


def test_the_lines_give_the_draft_and_mark_it_among_the_candidates() -> None:
    first, *rest = OwnDraft((WHOLE, QUICK), 4).lines
    assert first == "draft made from the target: int4, 2 of 4 layers (without 1, 2)"
    assert [line[0] for line in rest] == [" ", "*"]
    assert "agrees on 90.0 % of tokens, reads 0.10 of the target's bytes" in rest[1]
