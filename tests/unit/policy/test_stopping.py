"""Stop rules: when they stop, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from yggdrasil.policy.stopping import LowConfidence, SmallGain, last_gain
from yggdrasil.tree import TokenTree


def chain(*probabilities: float) -> TokenTree:
    tree = TokenTree.root(0, 1 + len(probabilities))
    log_prob = 0.0
    for node, probability in enumerate(probabilities):
        log_prob += torch.tensor(probability).log().item()
        tree.grow(torch.tensor([node]), torch.tensor([node + 1]), torch.tensor([log_prob]))
    return tree


def test_low_confidence_reads_the_last_token_and_not_the_path() -> None:
    rule = LowConfidence(0.5)
    assert not rule.enough(chain(0.6, 0.6, 0.6))  # the path has 0.216
    assert not rule.enough(chain(0.1, 0.9))
    assert rule.enough(chain(0.9, 0.4))
    assert rule.enough(chain(0.4))


def test_growth_stops_at_a_gain_computed_by_hand() -> None:
    tree = TokenTree.root(0, 5)
    tree.grow(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0.5, 0.4]).log())
    tree.grow(torch.tensor([1, 1]), torch.tensor([3, 4]), torch.tensor([0.3, 0.2]).log())
    # the best three nodes are 1 + 0.5 + 0.4 before and after: no gain; of the best four, the step gains 0.3
    assert SmallGain(2, (0.0,) * 3, 0.01).enough(tree)
    assert not SmallGain(2, (0.0,) * 4, 0.29).enough(tree)
    assert SmallGain(2, (0.0,) * 4, 0.31).enough(tree)
    assert not SmallGain(2, (0.0,) * 64, 0.49).enough(tree)
    # verifying a fourth or a fifth node costs 0.25: the step gains 0.05
    assert not SmallGain(2, (0.0, 0.1, 0.1, 0.25, 0.25), 0.04).enough(tree)
    assert SmallGain(2, (0.0, 0.1, 0.1, 0.25, 0.25), 0.06).enough(tree)


def test_last_gain_of_many_trees_equals_that_of_each() -> None:
    log_prob_MN = -np.random.default_rng(1).exponential(size=(5, 9))
    costs = (0.0, 0.0, 0.1, 0.1, 0.2, 0.2)
    assert last_gain(log_prob_MN, 4, costs).tolist() == [
        pytest.approx(float(last_gain(log_prob_N, 4, costs))) for log_prob_N in log_prob_MN
    ]
