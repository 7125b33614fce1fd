"""Platt scaling of the draft's probabilities: by hand, in both forms, and fitted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yggdrasil.policy.acceptance import MIN_SLOPE, fit_platt
from yggdrasil.step.platt import UNSCALED, PlattScale

SURE = PlattScale(slope=2.0, offset=1.0)


def test_a_scaled_probability_equals_a_value_computed_by_hand() -> None:
    # odds of 3 squared and times e
    assert math.exp(SURE.log(math.log(0.75))) == pytest.approx(9 * math.e / (9 * math.e + 1))


def test_the_unscaled_scale_changes_nothing() -> None:
    log_probs = torch.tensor([-0.3, -7.0])
    assert UNSCALED.log(-0.3) == -0.3
    assert UNSCALED.logs(log_probs) is log_probs
    # the formula agrees
    torch.testing.assert_close(PlattScale(1.0 + 1e-12, 0.0).logs(log_probs), log_probs)


@given(
    slope=st.floats(MIN_SLOPE, 5),
    offset=st.floats(-5, 5),
    log_probs=st.lists(
        st.floats(-80, 0) | st.sampled_from([0.0, -1e-7, -math.inf]), min_size=1, max_size=8
    ),
)
def test_both_forms_agree_and_give_logarithms_of_probabilities_in_order(
    slope: float, offset: float, log_probs: list[float]
) -> None:
    platt = PlattScale(slope, offset)
    log_probs = sorted(torch.tensor(log_probs).tolist())
    scaled = platt.logs(torch.tensor(log_probs))
    torch.testing.assert_close(
        scaled, torch.tensor([platt.log(each) for each in log_probs]), rtol=1e-4, atol=1e-4
    )
    assert (scaled <= 0).all()
    assert (scaled[:-1] <= scaled[1:] + 1e-5).all()


def test_a_probability_rounded_above_one_counts_as_one() -> None:
    assert SURE.log(1e-7) == 0.0
    assert SURE.logs(torch.tensor([1e-7])).tolist() == [0.0]


def test_a_fit_finds_the_scale_that_the_outcomes_were_drawn_with() -> None:
    rng = np.random.default_rng(0)
    log_probs_MC = np.log(rng.uniform(0.02, 0.98, size=(20_000, 2)))
    probability = np.vectorize(lambda log_prob: math.exp(SURE.log(log_prob)))(log_probs_MC)
    fitted = fit_platt(log_probs_MC, rng.random(probability.shape) < probability)
    assert (fitted.slope, fitted.offset) == (
        pytest.approx(SURE.slope, abs=0.05),
        pytest.approx(SURE.offset, abs=0.05),
    )


def test_a_fit_without_both_outcomes_scales_nothing() -> None:
    log_probs_MC = np.log([[0.7, 0.2]])
    assert fit_platt(log_probs_MC, np.array([[True, True]])) == UNSCALED
    assert fit_platt(log_probs_MC, np.array([[False, False]])) == UNSCALED


def test_the_slope_stays_positive_for_a_draft_with_inverted_confidence() -> None:
    log_probs_MC = np.log(np.tile([0.9, 0.1], (500, 1)))
    assert fit_platt(log_probs_MC, np.tile([False, True], (500, 1))).slope == MIN_SLOPE
