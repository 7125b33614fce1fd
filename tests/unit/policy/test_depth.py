"""The depth predictor: labels, splits, fitting, held-out figures and decisions, on synthetic traces.

Shapes: H = outputs of the encoder.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from yggdrasil.offline.depth_evaluation import (
    calibration_error,
    decision_quality,
    evaluate,
    scores_by_depth,
)
from yggdrasil.offline.depth_training import HeldOut, accepted_lengths, fit_predictor, held_out
from yggdrasil.offline.traces import Forced, Traces
from yggdrasil.policy.acceptance import Acceptance, TreeRecord
from yggdrasil.policy.depth import DepthPredictor, Heads
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.shape import Arms, ContextShape
from yggdrasil.state import PLAIN, DecodeState, HostHidden, Row, Shape

pytestmark = pytest.mark.usefixtures("kernels")

DEPTH = 4
EMBEDDING = torch.eye(3)
LATENCY = LatencyModel(
    draft=Curve((0,), (2,), ((1.0,),)),
    verify=Curve((0,), (2, 8), ((10.0, 10.0),)),
    growth_host_ms=0.0,
    step_host_ms=0.0,
    plain_host_ms=0.0,
)


def chain(num_accepted: int) -> TreeRecord:
    """A chain of DEPTH draft tokens of which the first ones are accepted."""
    log_probs = tuple(-0.1 * node for node in range(DEPTH + 1))
    return TreeRecord(1, log_probs, tuple(node <= num_accepted for node in range(DEPTH + 1)))


def traces(
    num_texts: int = 30, per_text: int = 20, *, temperature: float = 0.0, share: float = 0.5, seed: int = 0
) -> Traces:
    """The first feature predicts 4 accepted tokens or none, wrongly in one of ten; the rest is noise.

    Args:
        share: Of positions with 4 accepted tokens.
    """
    rng = np.random.default_rng(seed)
    easy = rng.random(num_texts * per_text) < share
    lie = rng.random(len(easy)) < 0.1
    hidden = rng.normal(size=(len(easy), 8)).astype(np.float32)
    hidden[:, 0] = np.where(easy ^ lie, 1.0, -1.0)
    text_N = np.repeat(np.arange(num_texts), per_text)
    return traced(hidden, np.where(easy, DEPTH, 0), text_N, temperature)


def traced(
    hidden_NE: np.ndarray, length_N: np.ndarray, text_N: np.ndarray, temperature: float = 0.0
) -> Traces:
    """Positions whose drafted and forced labels are the same."""
    records = tuple(chain(length) for length in length_N.tolist())
    root_N = np.zeros_like(length_N)
    forced = Forced(hidden_NE, root_N, text_N, length_N)
    return Traces(temperature, hidden_NE, root_N, text_N, records, (), forced)


@pytest.fixture(scope="module")
def found() -> HeldOut:
    return held_out([traces()], DEPTH, EMBEDDING)[0]


@pytest.fixture(scope="module")
def rooted() -> HeldOut:
    """Nothing but the root tells easy positions from hard ones."""
    trace = traces()
    root_N = np.where(trace.hidden_NE[:, 0] > 0, 2, 1)
    hidden_NE = trace.hidden_NE[:, 1:]
    forced = replace(trace.forced, hidden_NE=hidden_NE, root_N=root_N)
    changed = replace(trace, hidden_NE=hidden_NE, root_N=root_N, forced=forced)
    return held_out([changed], DEPTH, EMBEDDING)[0]


def test_accepted_length_counts_draft_tokens_only() -> None:
    assert accepted_lengths([chain(0), chain(3)]).tolist() == [0, 3]


def test_every_text_is_predicted_by_a_predictor_not_fitted_on_it(found: HeldOut) -> None:
    folds_of_text = [set(found.fold_N[found.trace.text_N == text].tolist()) for text in range(30)]
    assert all(len(folds) == 1 for folds in folds_of_text)
    assert set.union(*folds_of_text) == {0, 1, 2, 3}
    test = found.fold_N == 2
    left_out = set(found.trace.text_N[test].tolist())
    again = fit_predictor([found.trace], DEPTH, EMBEDDING, without=left_out)
    changed = found.trace.forced.hidden_NE.copy()
    changed[test] = 1e3
    forced = replace(found.trace.forced, hidden_NE=changed)
    without = fit_predictor([replace(found.trace, forced=forced)], DEPTH, EMBEDDING, without=left_out)
    hidden_NE = found.trace.hidden_NE[test]
    root_N = found.trace.root_N[test]
    np.testing.assert_array_equal(
        without.survivals(hidden_NE, root_N, 0.0), again.survivals(hidden_NE, root_N, 0.0)
    )


def test_the_calibration_error_equals_a_value_computed_by_hand() -> None:
    scores = np.array([0.05, 0.05, 0.95, 0.95])
    assert calibration_error(np.array([False, False, True, True]), scores) == pytest.approx(0.05)
    assert calibration_error(np.array([True, True, False, False]), scores) == pytest.approx(0.95)


def test_predictor_separates_easy_from_hard_and_beats_the_constant(found: HeldOut) -> None:
    report = evaluate(found, LATENCY, (2, 8))
    for row in report["depths"]:
        assert row["brier"] < 0.7 * row["brier_constant"]
        assert row["auc"] > 0.8
        assert row["ece"] < 0.15


def test_the_root_predicts_where_hidden_states_do_not(rooted: HeldOut) -> None:
    for row in evaluate(rooted, LATENCY, (2, 8))["depths"]:
        assert row["brier"] < 0.7 * row["brier_constant"]
        assert row["auc"] > 0.8


def test_a_token_far_from_all_roots_of_the_text_adds_no_more_than_they_may(rooted: HeldOut) -> None:
    """Roots are tokens 1 and 2; token 3 lies a thousand deviations away, where fp16 has no numbers."""
    embedding_VE = torch.cat((EMBEDDING, torch.tensor([[0.0, 1e9, -1e9]])))
    predictor = fit_predictor([rooted.trace], DEPTH, embedding_VE)
    assert np.isfinite(predictor.of_root_VH).all()


def test_a_predictor_of_some_roots_has_their_rows_alone(rooted: HeldOut) -> None:
    whole = fit_predictor([rooted.trace], DEPTH, EMBEDDING)
    some = fit_predictor([rooted.trace], DEPTH, EMBEDDING, only_tokens=torch.tensor([1, 2]))
    np.testing.assert_array_equal(some.of_root_VH[[1, 2]], whole.of_root_VH[[1, 2]])
    assert not np.delete(some.of_root_VH, [1, 2], axis=0).any()


def test_scores_equal_values_computed_by_hand() -> None:
    survival_ND = np.array([[0.9, 0.5], [0.5, 0.2], [0.1, 0.1], [0.7, 0.3]])
    first, second = scores_by_depth(np.array([2, 1, 0, 1]), survival_ND, np.full((4, 2), 0.5))
    assert first["brier"] == pytest.approx((0.1**2 + 0.5**2 + 0.1**2 + 0.3**2) / 4)
    assert first["brier_constant"] == pytest.approx(0.25)
    assert first["skill"] == pytest.approx(1 - first["brier"] / 0.25)
    assert (first["share"], first["rarer"], first["auc"]) == (0.75, 1, 1.0)
    assert (second["share"], second["rarer"], second["auc"]) == (0.25, 1, 1.0)


def test_temperatures_share_an_encoder_and_never_their_base_rates() -> None:
    """Where inputs carry no information, every temperature predicts its own share."""
    both = [traces(temperature=0.0, share=0.9), traces(temperature=1.0, share=0.2, seed=1)]
    deaf = [
        replace(each, forced=replace(each.forced, hidden_NE=np.zeros_like(each.hidden_NE))) for each in both
    ]
    predictor = fit_predictor(deaf, DEPTH, EMBEDDING)
    for each in deaf:
        share = (accepted_lengths(each.deep) >= 1).mean()
        survival_ND = predictor.survivals(each.hidden_NE, each.root_N, each.temperature)
        np.testing.assert_allclose(survival_ND, share, atol=0.02)
    assert len({id(predictor.encoder) for _ in deaf}) == 1


def test_deviations_without_a_slope_leave_the_base_rates() -> None:
    both = [traces(temperature=0.0, share=0.9), traces(temperature=1.0, share=0.2, seed=1)]
    none = {0.0: np.zeros(DEPTH), 1.0: np.zeros(DEPTH)}
    predictor = fit_predictor(both, DEPTH, EMBEDDING, slopes=none)
    for each in both:
        reached = (accepted_lengths(each.deep)[:, None] >= np.arange(1, DEPTH + 1)).sum(axis=0)
        share_D = (reached + 0.5) / (len(each.deep) + 1)
        survival_ND = predictor.survivals(each.hidden_NE, each.root_N, each.temperature)
        np.testing.assert_allclose(survival_ND, np.tile(share_D, (len(survival_ND), 1)), rtol=1e-5)


def test_deviations_that_are_noise_get_a_small_slope(found: HeldOut) -> None:
    trace = found.trace
    shuffled = np.random.default_rng(1).permutation(len(trace.deep))
    noise = traced(trace.hidden_NE[shuffled], accepted_lengths(trace.deep), trace.text_N)
    assert held_out([noise], DEPTH, EMBEDDING)[0].slope_D.max() < 0.5 < found.slope_D.min()


def test_a_menu_of_depth_one_gets_one_head() -> None:
    (found,) = held_out([traces(num_texts=6)], 1, EMBEDDING)
    assert found.survival_ND.shape == (120, 1)
    assert [row["depth"] for row in evaluate(found, LATENCY, (2, 8))["depths"]] == [1]


def test_survival_never_rises_with_depth(found: HeldOut) -> None:
    survival_ND = found.survival_ND
    assert survival_ND.shape == (600, DEPTH)
    assert (np.diff(survival_ND, axis=1) <= 0).all()
    assert ((survival_ND >= 0) & (survival_ND <= 1)).all()


def test_decisions_lie_between_the_fixed_depth_and_the_oracle(found: HeldOut) -> None:
    decisions = decision_quality(found, LATENCY, (2, 8))
    ms = decisions["ms_per_token"]
    assert ms["oracle"] < ms["predicted"] < ms["fixed"]
    assert decisions["best"] == "predicted"
    assert decisions["regret_ms_predicted"] == pytest.approx(ms["predicted"] - ms["oracle"])
    # 5 tokens in 14 ms or 1 in 14 ms, equally often: 4.67 ms a token, the other depths are slower
    assert decisions["fixed_depths"] == [4, 4, 4, 4]


def test_a_predictor_fitted_on_noise_is_not_useful() -> None:
    trace = traces()
    shuffled = np.random.default_rng(1).permutation(len(trace.deep))
    noise = traced(trace.hidden_NE[shuffled], accepted_lengths(trace.deep), trace.text_N)
    decisions = decision_quality(held_out([noise], DEPTH, EMBEDDING)[0], LATENCY, (2, 8))
    assert decisions["ms_per_token"]["predicted"] >= decisions["ms_per_token"]["fixed"]
    assert decisions["best"] == "fixed"


def test_stopping_growth_is_evaluated_where_it_may_be_used(found: HeldOut) -> None:
    """Half of the chains are accepted, half are not; the draft stops the latter after one step."""
    assert "stopping" not in decision_quality(found, LATENCY, (2, 8))["ms_per_token"]
    knowing = tuple(
        replace(record, log_probs=(0.0, *[0.0 if record.accepted[-1] else -9.0] * DEPTH))
        for record in found.trace.deep
    )
    decisions = decision_quality(
        replace(found, trace=replace(found.trace, deep=knowing)), LATENCY, (2, 8), may_stop=True
    )
    assert decisions["best"] == "stopping"
    deep = np.array([record.accepted[-1] for record in knowing])
    assert decisions["mean_stopped_depth"] == pytest.approx(np.where(deep, DEPTH, 1).mean())
    # depth 4 takes 14 ms and emits 5 tokens, depth 1 takes 11 ms and emits 1
    assert decisions["ms_per_token"]["stopping"] == pytest.approx(
        (14 * deep.sum() + 11 * (~deep).sum()) / (5 * deep.sum() + (~deep).sum())
    )


def constant(value: float, trust: float = 1.0) -> DepthPredictor:
    """A network that predicts `value` at every depth, for a text whose mean was one half."""
    zero = {"encoder_1": (2, 2), "encoder_2": (2, 2)}
    weights = {f"{name}.weight": np.zeros(shape, dtype=np.float32) for name, shape in zero.items()}
    biases = {f"{name}.bias": np.zeros(2, dtype=np.float32) for name in zero}
    heads = Heads(
        weight_HD=np.zeros((2, DEPTH), dtype=np.float32),
        bias_D=np.full(DEPTH, np.log(value / (1 - value)), dtype=np.float32),
        base_D=np.zeros(DEPTH, dtype=np.float32),
        mean_D=np.full(DEPTH, 0.5, dtype=np.float32),
        trust=trust,
    )
    return DepthPredictor(weights | biases, np.zeros((3, 2), dtype=np.float16), {0.0: heads})


def test_a_predictor_survives_its_file() -> None:
    both = [traces(num_texts=6), traces(num_texts=6, temperature=1.0, share=0.2)]
    predictor = fit_predictor(both, DEPTH, EMBEDDING, trust={1.0: 0.25})
    again = DepthPredictor.from_bytes(predictor.to_bytes())
    assert list(again.heads) == [0.0, 1.0]
    for each in both:
        np.testing.assert_array_equal(
            again.survivals(each.hidden_NE, each.root_N, each.temperature),
            predictor.survivals(each.hidden_NE, each.root_N, each.temperature),
        )
    assert [heads.trust for heads in again.heads.values()] == [1.0, 0.25]
    np.testing.assert_array_equal(again.heads[1.0].mean_D, predictor.heads[1.0].mean_D)
    with pytest.raises(SafetensorError):
        DepthPredictor.from_bytes(b"not a predictor")


def policy(predictor: DepthPredictor) -> ContextShape:
    rows = tuple(
        tuple(min(1.0 + 0.5 * depth, 1.0 + 0.5 * k) for k in range(depth + 1))
        for depth in range(1, DEPTH + 1)
    )
    acceptance = Acceptance((-1.0, 0.0), (0.0, 1.0), {1: rows})
    return ContextShape(
        shape=PLAIN,
        acceptance=acceptance,
        latency=LATENCY,
        verify_widths=(2, 8),
        widths=(1,),
        predictor=predictor,
        temperature=0.0,
    )


def shape_of(policy: ContextShape, state: DecodeState | None = None) -> Shape:
    """The shape for a context whose hidden state is known, if no other is given."""
    state = state or DecodeState([1, 2], hidden_of=torch.ones(2).detach)
    [shape] = policy.choose([Row(0, state)]).shapes
    return shape


def test_a_context_with_zero_predicted_acceptance_is_decoded_plainly() -> None:
    assert shape_of(policy(constant(0.01))) == PLAIN


def test_a_context_with_high_predicted_acceptance_is_drafted_deeply() -> None:
    assert shape_of(policy(constant(0.99))) == Shape(1, DEPTH)


def test_a_predictor_with_zero_trust_changes_no_shape() -> None:
    assert (
        shape_of(policy(constant(0.01, trust=0.0)))
        == shape_of(policy(constant(0.99, trust=0.0)))
        == Shape(1, DEPTH)
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_call_for_one_position_equals_its_specification(rooted: HeldOut, dtype: torch.dtype) -> None:
    trace = rooted.trace
    predictor = fit_predictor([trace], DEPTH, EMBEDDING, trust={0.0: 0.9})
    arms = policy(predictor).arms(0)
    call = predictor.call(0.0)
    chosen = set()
    for hidden_E, root in zip(torch.from_numpy(trace.hidden_NE[:40]).to(dtype), trace.root_N, strict=False):
        growth_D = predictor.growth(hidden_E[None].float().numpy(), root[None], 0.0)[0]
        best = arms.best(growth_D, arms.rate)
        on_host = HostHidden(hidden_E.data_ptr(), hidden_E.element_size(), hidden_E.detach)
        for hidden_of in (on_host, hidden_E.detach):
            assert call.best_arm(arms.struct, hidden_of, int(root)) == best
            np.testing.assert_allclose(call.growth_D, growth_D, rtol=1e-4)
        chosen.add(best)
    assert len(chosen) > 1, "an arm that never changes proves little"


def test_growth_is_the_length_over_its_mean_as_far_as_it_is_trusted() -> None:
    """A prediction of 0.75 at every depth where the mean was 0.5: 1.5 times the length."""
    for trust, expected in ((1.0, 1.5), (0.5, 1.25), (0.0, 1.0)):
        growth_ND = constant(0.75, trust).growth(
            np.zeros((3, 2), dtype=np.float32), np.zeros(3, dtype=np.int64), 0.0
        )
        np.testing.assert_allclose(growth_ND, np.full((3, DEPTH), expected), rtol=1e-5)


def test_trust_is_the_correct_share_of_a_predicted_deviation(found: HeldOut) -> None:
    assert 0.5 < found.trust <= 1.0
    exaggerated = replace(found, growth_ND=1 + 4 * (found.growth_ND - 1))
    assert exaggerated.trust == pytest.approx(found.trust / 4, rel=0.3)
    assert replace(found, growth_ND=1 - (found.growth_ND - 1)).trust == 0.0


def test_without_a_hidden_state_the_best_shape_of_the_calibration_is_taken() -> None:
    assert shape_of(policy(constant(0.01)), DecodeState([1])).depth > 0


def test_growth_of_one_selects_the_arm_of_equation_three() -> None:
    arms = policy(constant(0.5)).arms(0)
    assert isinstance(arms, Arms)
    # depth 4: 3 tokens in 1 + 3 + 10 = 14 ms; depth 3: 2.5 in 13; depth 2: 2 in 12; depth 1: 1.5 in 11;
    # plain: 1 in 10
    assert arms.shapes[arms.best(np.ones(DEPTH))] == arms.shapes[arms.best()] == Shape(1, 4)
    assert arms.shapes[arms.best(np.array([1.0, 1.0, 1.0, 0.5]))] == Shape(1, 3)
