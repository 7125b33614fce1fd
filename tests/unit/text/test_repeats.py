"""What repeats in a text: matches against a search by definition, and what they predict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.text.repeats import LONGEST, MIN_PATH, Graft, Match, Repeats, longest_match

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def followed(tokens: Sequence[int], prompt_len: int = 0) -> Repeats:
    repeats = Repeats(prompt_len)
    repeats.follow_(tokens)
    return repeats


def by_definition(tokens: Sequence[int], end: int) -> Match:
    """The longest equal end first, and of equal ones the last place."""
    for length in range(min(LONGEST, end - 1), 0, -1):
        for place in range(end - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[end - length : end]:
                return Match(place, length)
    return Match(-1, 0)


@given(TEXTS)
def test_a_match_is_the_last_place_of_the_longest_equal_end(tokens: list[int]) -> None:
    assert longest_match(tokens, len(tokens)) == by_definition(tokens, len(tokens))


@given(TEXTS, st.integers(0, 60), st.integers(1, 15), st.lists(st.integers(1, 6)))
def test_a_text_read_in_chunks_gives_the_graft_of_one_read_at_once(
    tokens: list[int], prompt_len: int, most: int, chunks: list[int]
) -> None:
    repeats = Repeats(prompt_len)
    end = 0
    for chunk in chunks:
        end = min(end + chunk, len(tokens))
        repeats.follow_(tokens[:end])
        repeats.graft(most)
    repeats.follow_(tokens)
    assert repeats.graft(most) == followed(tokens, prompt_len).graft(most)


def test_a_text_that_was_cut_is_read_anew() -> None:
    repeats = followed([1, 2, 3, 1, 2, 3, 1, 2])
    repeats.graft(4)
    repeats.follow_([1, 2, 3, 1])
    assert repeats.graft(4) == followed([1, 2, 3, 1]).graft(4)


def test_the_graft_is_what_followed_the_longest_match() -> None:
    text = [*range(20), 99, *range(5, 15)]
    assert followed(text, prompt_len=len(text)).graft(4).tokens == (15, 16, 17, 18)


def test_a_graft_beyond_the_end_of_the_text_goes_on_with_itself() -> None:
    text = [7, 8, 9] * 8
    assert followed(text, prompt_len=len(text)).graft(7).tokens == (7, 8, 9, 7, 8, 9, 7)


def test_a_text_without_repetition_has_no_graft() -> None:
    assert followed(range(40)).graft(15) == Graft((), ())


def test_no_node_is_less_likely_than_the_limit() -> None:
    text = [*range(20), 99, 3, 4]
    graft = followed(text, prompt_len=len(text)).graft(15)
    assert 0 < len(graft.tokens) < 15
    assert math.exp(sum(graft.log_probs)) >= MIN_PATH


def test_a_chain_ends_before_a_token_that_is_less_likely_than_the_minimum() -> None:
    text = [*range(20), 99, 3, 4]
    whole = followed(text, prompt_len=len(text)).graft(15)
    likelihoods = [math.exp(edge) for edge in whole.log_probs]
    assert likelihoods == sorted(likelihoods)  # a longer match is more likely to go on
    for min_edge in (likelihoods[0], 0.999):
        graft = followed(text, prompt_len=len(text)).graft(15, min_edge)
        assert graft == (whole if min_edge <= likelihoods[0] else Graft((), ()))


def test_what_short_matches_show_counts_for_long_ones() -> None:
    long = [*range(30, 36), 98]
    broken = [4, 50, 4, 51, 4, 52, 4, 53]
    other = [*range(60, 68)]
    ends = [followed([*long, *shown, *long[:-1]], prompt_len=7) for shown in (broken, other)]
    likelihoods = [end.graft(1).log_probs[0] for end in ends]
    assert likelihoods[0] < likelihoods[1]


def test_a_longer_match_and_a_text_that_kept_its_word_are_likelier() -> None:
    text = [*range(20), 99, *range(11)]
    short = followed([*range(20), 99, 6, 7], prompt_len=23).graft(1).log_probs[0]
    long = followed(text, prompt_len=len(text)).graft(1).log_probs[0]
    kept = followed(text, prompt_len=21).graft(1).log_probs[0]
    broken = followed([*range(20), 99, 4, 50, 4, 51, 4, 52, 4], prompt_len=21).graft(1).log_probs[0]
    assert broken < short < long < kept
