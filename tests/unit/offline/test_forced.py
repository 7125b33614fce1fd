"""Accepted lengths without drafting: exact for chains, and how near they are for wider trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_pair

from yggdrasil.offline.depth_training import accepted_lengths
from yggdrasil.offline.forced import average_children, forced_lengths
from yggdrasil.offline.traces import Traces, beginnings
from yggdrasil.offline.tuning import collect
from yggdrasil.pair import LoadedPair

DEPTH = 4


def traces(tiny: LoadedPair, width: int) -> list[Traces]:
    """Texts of the tiny pair; all trees have this width."""
    config = replace(tiny.bundle.config, widths=(width,), calibration_tokens=20)
    prompts = beginnings(tiny_pair.stories(6, seed=3), tiny.tokenizer, "")
    models = (tiny.engine.target, tiny.engine.draft)
    return collect(replace(tiny.bundle, config=config), models, prompts, [], tiny_pair.SilentProgress())


def both(trace: Traces) -> tuple[np.ndarray, np.ndarray]:
    """Forced and drafted lengths at the positions that have a tree: every second one of a text."""
    per_text = len(trace.forced.length_N) // 6
    forced = trace.forced.length_N.reshape(6, per_text)
    return forced[:, ::2].ravel(), accepted_lengths(trace.deep)


def test_forced_chains_are_accepted_exactly_as_drafted_ones(tiny: LoadedPair) -> None:
    for trace in traces(tiny, 1):
        forced, drafted = both(trace)
        assert forced.tolist() == drafted.tolist()
        assert 0 < drafted.mean() < DEPTH, "lengths that never change prove little"


def test_most_forced_trees_are_accepted_as_drafted_ones(tiny: LoadedPair) -> None:
    for trace in traces(tiny, 2):
        forced, drafted = both(trace)
        assert (forced == drafted).mean() > 0.8
        assert abs(forced.mean() - drafted.mean()) < 0.1 * drafted.mean()


def lengths(log_probs: list[list[float]], rank: list[int], children: list[float], width: int) -> list[int]:
    """Of one root; `rank` is that of the token that follows, by depth."""
    is_next = np.array(rank)[:, None] == np.arange(len(log_probs[0]))
    found = forced_lengths(np.array([log_probs]), is_next[None], np.array(children), width)
    return [int(each) for each in found]


def test_a_forced_chain_ends_at_a_token_that_is_not_its_first_candidate() -> None:
    log_probs = [[-0.1, -3.0]] * 3
    assert lengths(log_probs, [0, 0, 0], [-9.0, -9.0], 1) == [3]
    assert lengths(log_probs, [0, 1, 0], [-9.0, -9.0], 1) == [1]


def test_a_tree_takes_the_best_of_all_open_candidates() -> None:
    """Two nodes a step. The text follows the second child of the root, which is in the first step; its own
    first child competes with the children of the first child, which is an average node.
    """
    log_probs = [[-0.5, -1.0, -5.0]] * 2
    assert lengths(log_probs, [1, 0], [-3.0, -4.0, -5.0], 2) == [2]
    # two average children at -0.5 - 0.4 come before the one at -1.5
    assert lengths(log_probs, [1, 0], [-0.4, -0.4, -5.0], 2) == [1]
    assert lengths(log_probs, [2, 0], [-3.0, -4.0, -5.0], 2) == [0]


def test_more_roots_than_are_computed_at_once_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    log_probs = np.log(random.dirichlet(np.ones(4), size=(50, DEPTH)))
    is_next = random.integers(0, 6, size=(50, DEPTH, 1)) == np.arange(4)
    children = average_children(log_probs.reshape(-1, 4))
    whole = forced_lengths(log_probs, is_next, children, 2)
    monkeypatch.setattr("yggdrasil.offline.forced.ROOTS_AT_ONCE", 7)
    assert forced_lengths(log_probs, is_next, children, 2).tolist() == whole.tolist()


def test_an_average_node_has_the_mean_probabilities() -> None:
    children = average_children(np.log([[0.5, 0.2], [0.7, 0.1]]))
    np.testing.assert_allclose(np.exp(children), [0.6, 0.15])
