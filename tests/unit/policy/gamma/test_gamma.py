"""Policies of speculative lengths except Nightjar's, on traces computed by hand; all on random loads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import ConfigError
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.adabingreedy import AdaBinGreedy
from yggdrasil.policy.gamma.banditspec import BanditSpec
from yggdrasil.policy.gamma.budget import prompt_budget
from yggdrasil.policy.gamma.dsd import DSD
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.linear import LinThompson, LinUCB
from yggdrasil.policy.gamma.prior import Budget, GoodputPrior
from yggdrasil.policy.gamma.protocol import BatchPolicy, Load, Outcome
from yggdrasil.policy.gamma.registry import POLICIES, PolicyParts, gamma_policy, predicted_goodput
from yggdrasil.policy.gamma.tetris import Tetris
from yggdrasil.policy.gamma.tiers import AdaptiveTiers, TierConfig
from yggdrasil.policy.latency import Curve, LatencyModel
from yggdrasil.policy.uncalibrated import UNCALIBRATED
from yggdrasil.state import PLAIN, Shape
from yggdrasil.step.choice import Calibration

GAMMA_MAX = 5
MAX_BATCH = 16
PRIOR = GoodputPrior(
    drafting=lambda batch_size, gamma: 0.001 * gamma,
    verifying=lambda tokens: 0.01 + 0.0001 * tokens,
    emitted=lambda gamma: 2 - 0.5**gamma,
    widths=(8, 32, 128),
)
PARTS = PolicyParts(GAMMA_MAX, MAX_BATCH, PRIOR, lambda lag, batch_size: 0.0001 * lag * batch_size, seed=3)
EVERY_POLICY = [*POLICIES, "fixed-3"]


class Script:
    """A random generator that draws given numbers."""

    def __init__(
        self, uniforms: Sequence[float] = (), arms: Sequence[int] = (), normals: Sequence[list[float]] = ()
    ) -> None:
        self.uniforms = iter(uniforms)
        self.arms = iter(arms)
        self.normals = iter(normals)

    def random(self) -> float:
        return next(self.uniforms)

    def integers(self, bound: int) -> int:
        arm = next(self.arms)
        assert 0 <= arm < bound
        return arm

    def standard_normal(self, count: int) -> np.ndarray:
        return np.array(next(self.normals)[:count])


def outcome(gamma: int, goodput: float, *, batch_size: int = 1, gamma_max: int = GAMMA_MAX) -> Outcome:
    """A step with this realised goodput: every row emits one token."""
    load = Load(batch_size, gamma_max)
    return Outcome(load, gamma, [gamma] * batch_size, [1] * batch_size, batch_size / goodput)


def accepted(gamma: int, *by_row: int) -> Outcome:
    """A step of 10 ms whose rows accepted these numbers of gamma draft tokens."""
    load = Load(len(by_row), GAMMA_MAX)
    return Outcome(load, gamma, [gamma] * len(by_row), [1 + count for count in by_row], 0.01)


def chosen_gamma(policy: BatchPolicy, load: Load) -> int:
    """The depth of the chains that a policy chooses for rows without limits."""
    (gamma,) = {shape.depth for shape in policy.choose(load).shapes}
    return gamma


def test_a_chain_is_no_deeper_than_its_row_can_use() -> None:
    """Row 2 can use no draft, so it is plain; all 3 + 2 + 3 drafts are verified."""
    calibrations = tuple(Calibration(UNCALIBRATED.platt, UNCALIBRATED.calibration.knots) for _ in range(4))
    load = Load(4, 5, calibrations=calibrations, depth_limits=(5, 2, 0, 3))
    choice = FixedGamma(3).choose(load)
    assert choice.shapes == (Shape(1, 3), Shape(1, 2), PLAIN, Shape(1, 3))
    assert choice.calibrations == calibrations
    assert (choice.menu.nodes, choice.menu.extra) == ((8,), ())
    assert choice.menu.best([0.0] * 9, num_rows=4, depth=3) == 8


def test_rows_without_limits_are_as_deep_as_settings_and_menu_allow() -> None:
    assert FixedGamma(3).choose(Load(2, 2)).shapes == (Shape(1, 2),) * 2
    assert FixedGamma(3).choose(Load(2, 3, drafts_max=3)).shapes == (Shape(1, 1),) * 2


def test_without_speculation_every_row_is_plain_and_nothing_is_verified() -> None:
    for choice in (FixedGamma(0).choose(Load(2, 5)), Tetris(5, share=0.6).choose(Load(2, 0))):
        assert choice.shapes == (PLAIN, PLAIN)
        assert choice.menu.best([0.0], num_rows=2, depth=0) == 0


def test_a_fixed_gamma_is_limited_by_the_menu() -> None:
    assert [FixedGamma(3).select(Load(8, gamma_max)) for gamma_max in (0, 2, 3, 7)] == [0, 2, 3, 3]


def test_tetris_verifies_its_share_of_draft_tokens_rounded_up() -> None:
    policy = Tetris(5, share=0.6)
    assert policy.select(Load(4, 7)) == 5
    for batch_size in (1, 2, 3, 4):
        assert policy.choose(Load(batch_size, 7)).menu.nodes == (3 * batch_size,)
    assert policy.choose(Load(3, 4)).menu.nodes == (8,)  # 7.2 of 12
    assert policy.choose(Load(3, 7, depth_limits=(5, 5, 1))).menu.nodes == (7,)  # 6.6 of 11


def test_tetris_verifies_no_more_than_the_largest_graph_holds() -> None:
    policy = Tetris(5, share=0.6)
    choices = [policy.choose(Load(4, 7, drafts_max=drafts_max)) for drafts_max in (11, 12, 13)]
    assert [choice.menu.nodes for choice in choices] == [(11,), (12,), (12,)]
    assert {choice.shapes for choice in choices} == {(Shape(1, 5),) * 4}


def test_a_tetris_share_that_verifies_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="share"):
        Tetris(5, share=0.0)


def test_ada_bingreedy_shares_one_clock_and_one_mean_among_batch_sizes() -> None:
    """Rounds 1-4 are first bins, which always explore; 5-6 are a second bin: 0.71 is above 1 / sqrt(2)."""
    policy = AdaBinGreedy(Script([0.9, 0.9, 0.9, 0.71], [0, 1, 2, 0]))  # type: ignore[arg-type]
    goodputs = {0: 100.0, 1: 300.0, 2: 200.0}
    chosen = []
    for batch_size in (1, 2, 4, 1, 8, 16):
        load = Load(batch_size, 2)
        chosen.append(policy.select(load))
        policy.observe(outcome(chosen[-1], goodputs[chosen[-1]], batch_size=batch_size, gamma_max=2))
    assert chosen == [0, 1, 2, 0, 1, 1]
    assert policy.state == {"block": 4, "gamma": 1, "tok_per_s": 300.0, "rounds": {"0": 2, "1": 3, "2": 1}}


POINTS = [
    (batch_size, gamma, 0.01 + 0.001 * gamma + 0.0001 * batch_size * (gamma + 1))
    for batch_size in (1, 4, 16)
    for gamma in range(4)
]


def test_dsd_fits_a_linear_latency_and_maximises_modelled_goodput() -> None:
    """Rate 0.5, B = 1: 1/10.1, 1.5/11.2, 1.75/12.3 and 1.875/13.4 per ms; B = 100: 1/20, 1.5/31."""
    policy = DSD(POINTS, rate=0.5)
    assert policy.coefficients == pytest.approx([0.01, 0.001, 0.0001])
    assert policy.select(Load(1, 3)) == 2
    assert policy.select(Load(100, 1)) == 0


def test_dsd_averages_acceptance_up_to_the_first_rejection_and_ignores_steps_without_drafts() -> None:
    """Two tokens are accepted and one is rejected; the token after the rejected one does not count."""
    policy = DSD(POINTS, rate=0.9)
    policy.observe(accepted(2, 2, 0))
    assert policy.rate == pytest.approx(0.9 + 0.1 * (2 / 3 - 0.9))
    policy.observe(accepted(0, 0, 0))
    assert policy.rate == pytest.approx(0.9 + 0.1 * (2 / 3 - 0.9))


def test_banditspec_tries_every_arm_once_and_then_follows_ucb1() -> None:
    """t = 3, maximum 200: 100/200 + sqrt(2 ln 3) = 1.98 and 150/200 + sqrt(ln 3) = 1.80."""
    policy = BanditSpec()
    load = Load(1, 1)
    chosen = []
    for goodput in (100.0, 200.0, 100.0):
        chosen.append(policy.select(load))
        policy.observe(outcome(chosen[-1], goodput))
    assert [*chosen, policy.select(load)] == [0, 1, 1, 0]


def test_linucb_runs_every_arm_once_and_then_adds_a_deviation_to_the_ridge_prediction() -> None:
    """x = [1, 1] and n rounds: theta . x = 2 n g / (1 + 2 n), x' A^-1 x = 2 / (1 + 2 n)."""
    policy = LinUCB(1, MAX_BATCH)
    load = Load(MAX_BATCH, 1)
    assert policy.select(load) == 0
    policy.observe(outcome(0, 200.0, batch_size=MAX_BATCH))
    mean, deviation = policy.arms.scores(load)
    assert mean == pytest.approx([2 / 3, 0.0])
    assert deviation == pytest.approx([(2 / 3) ** 0.5, 2**0.5])
    assert policy.select(load) == 1  # it has not run
    policy.observe(outcome(1, 190.0, batch_size=MAX_BATCH))
    assert policy.select(load) == 0  # 0.667 + 0.816 and 0.633 + 0.816
    policy.observe(outcome(0, 200.0, batch_size=MAX_BATCH))
    # 0.8 + 0.632 and 0.633 + 0.816; with half a deviation it would be 0.8 + 0.316 and 0.633 + 0.408
    assert policy.select(load) == 1


def test_linear_thompson_draws_from_the_same_posterior() -> None:
    """Means 2/3 and 1/3, deviations 0.5 * 0.816: the second arm wins only if it draws more than 0.816."""
    script = Script(normals=[[0.0, 0.8], [0.0, 0.85]])
    policy = LinThompson(1, MAX_BATCH, script)  # type: ignore[arg-type]
    load = Load(MAX_BATCH, 1)
    for gamma, goodput in enumerate((100.0, 50.0)):
        assert policy.select(load) == gamma  # every arm once
        policy.observe(outcome(gamma, goodput, batch_size=MAX_BATCH))
    assert [policy.select(load), policy.select(load)] == [0, 1]


@pytest.mark.parametrize("name", ["nightjar-printed", "banditspec", "linucb", "lints", "ada-bingreedy"])
def test_a_reward_is_not_learnt_from_a_step_with_prompts(name: str) -> None:
    policy = gamma_policy(name, PARTS)
    fresh = gamma_policy(name, PARTS)
    policy.observe(dataclasses.replace(outcome(2, 100.0), prompt_tokens=5))
    assert policy.state == fresh.state


@pytest.mark.parametrize("name", ["nightjar", "dsd", "tiers"])
def test_acceptance_is_learnt_from_a_step_with_prompts(name: str) -> None:
    policy = gamma_policy(name, PARTS)
    fresh = gamma_policy(name, PARTS)
    policy.observe(dataclasses.replace(accepted(3, 2, 1), prompt_tokens=5))
    assert policy.state != fresh.state


def test_tiers_move_after_the_warm_up_at_every_interval_and_down_to_the_average() -> None:
    """First 3 tokens are accepted, then none; the average moves the tier at batches 15, 20 and 30.

    At batch 15 the average 3 is above 3 - 0.5. Then it is 3 * 0.8^5 = 0.98 at 20, 0.32 at 25 and 0.11 at
    30; the bounds are 2.25 and 0.25.
    """
    policy = AdaptiveTiers(TierConfig())
    tiers = []
    for batch in range(1, 31):
        count = 3 if batch <= 15 else 0
        policy.observe(accepted(policy.num_steps, count, count))
        tiers.append(policy.num_steps)
    assert tiers == [3] * 14 + [7] * 5 + [3] * 10 + [1]
    assert policy.state == {"speculative_num_steps": 1, "avg_spec_accept_length": round(3 * 0.8**15, 4)}


def test_tiers_average_over_rows_and_then_over_batches() -> None:
    policy = AdaptiveTiers(TierConfig())
    policy.observe(accepted(3, 1, 3))  # starts at the batch's mean, 2
    policy.observe(accepted(3, 3, 3))
    policy.observe(accepted(0, 0, 0))  # no drafts: ignored
    assert policy.accepted == pytest.approx(2.2)
    assert policy.batches == 2


def immediate(**hysteresis: float) -> TierConfig:
    return TierConfig(warmup_batches=0, update_interval=1, ema_alpha=1.0, **hysteresis)


@pytest.mark.parametrize(
    ("hysteresis", "by_row", "steps"),
    [
        (-0.25, (3, 2, 2, 2), 3),  # 2.25 <= 3 - 0.5 - 0.25
        (0.0, (3, 2, 2, 2), 3),
        (-0.25, (3, 2), 7),  # 2.5 > 3 - 0.5 - 0.25
        (0.0, (3, 2), 3),  # 2.5 <= 3 - 0.5
    ],
)
def test_down_hysteresis_delays_a_move_down(hysteresis: float, by_row: tuple[int, ...], steps: int) -> None:
    policy = AdaptiveTiers(immediate(down_hysteresis=hysteresis), initial_steps=7)
    policy.observe(accepted(7, *by_row))
    assert policy.num_steps == steps


@pytest.mark.parametrize(("hysteresis", "steps"), [(0.0, 7), (0.5, 3)])  # 3 > 2.5, but not > 3
def test_up_hysteresis_delays_a_move_up(hysteresis: float, steps: int) -> None:
    policy = AdaptiveTiers(immediate(up_hysteresis=hysteresis))
    policy.observe(accepted(3, 3, 3))
    assert policy.num_steps == steps


def test_tiers_move_down_several_at_once_when_acceptance_collapses() -> None:
    policy = AdaptiveTiers(immediate(), initial_steps=7)
    policy.observe(accepted(7, 0, 0))
    assert policy.num_steps == 1


def test_the_first_tier_is_the_one_nearest_to_the_given_steps() -> None:
    for initial_steps, first in ((1, 1), (3, 3), (4, 3), (6, 7), (20, 7)):
        assert AdaptiveTiers(TierConfig(), initial_steps=initial_steps).num_steps == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidate_steps": (3, 1)},
        {"candidate_steps": ()},
        {"ema_alpha": 0.0},
        {"update_interval": 0},
        {"warmup_batches": -1},
    ],
)
def test_an_error_of_a_tier_config_names_the_wrong_field(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TierConfig(**wrong)  # type: ignore[arg-type]


def test_tiers_are_read_from_a_file_and_unknown_keys_are_errors(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    bad = tmp_path / "bad.json"
    good.write_text(json.dumps({"candidate_steps": [2, 4], "ema_alpha": 0.5}))
    bad.write_text(json.dumps({"candidate_step": [2, 4]}))
    policy = gamma_policy(f"tiers:{good}", PARTS)
    assert isinstance(policy, AdaptiveTiers)
    assert policy.config == TierConfig(candidate_steps=(2, 4), ema_alpha=0.5)
    with pytest.raises(ConfigError, match="candidate_step'"):
        gamma_policy(f"tiers:{bad}", PARTS)


@pytest.mark.parametrize("content", [None, "{", "[1, 3]"])
def test_an_error_of_a_tier_file_contains_its_path(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"tiers\.json"):
        gamma_policy(f"tiers:{path}", PARTS)


@pytest.mark.parametrize("name", ["ucb", "", "fixed", "fixed-0", "fixed-6", "fixed-x", "tiers:", "off-1"])
def test_an_error_of_an_unknown_policy_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="one of trees, nightjar, nightjar-printed, off"):
        gamma_policy(name, PARTS)


def test_a_policy_is_built_from_its_name() -> None:
    assert chosen_gamma(gamma_policy("fixed-5", PARTS), Load(1, 5)) == 5
    assert chosen_gamma(gamma_policy("off", PARTS), Load(1, 5)) == 0
    dsd = gamma_policy("dsd", PARTS)
    assert isinstance(dsd, DSD)
    assert dsd.coefficients == pytest.approx([0.01, 0.001, 0.0001])  # the prior's latencies
    assert dsd.rate == 0.5


LATENCY = LatencyModel(
    draft=Curve((0,), (2, 4, 16), ((1.0, 2.0, 9.0),)),
    verify=Curve((0,), (4, 8, 16), ((10.0, 11.0, 14.0),)),
    growth_host_ms=0.5,
    step_host_ms=2.0,
    plain_host_ms=1.0,
)
CHAINS = Acceptance((-1.0, 0.0), (0.0, 1.0), {1: ((1.0, 1.6), (1.0, 1.6, 1.9))})


def test_the_prior_adds_draft_forwards_verification_and_host(prior: GoodputPrior) -> None:
    """B = 5 at gamma 2: two drafts of 3 ms (graphs of 4 and 2) + 0.5 ms, 14 ms for 15 tokens, 2 ms."""
    assert prior.seconds(5, 2) == pytest.approx(0.023)
    assert prior.seconds(3, 0) == pytest.approx(0.011)
    assert prior.seconds(5, 3) == pytest.approx(0.0365)  # 20 tokens are a graph of 16 and one of 4
    assert prior.seconds(5, 2, verified=3, prompt_tokens=8) == pytest.approx(0.023)  # 16 tokens
    assert prior.seconds(5, 2, verified=3) == pytest.approx(0.020)  # 8 tokens


def test_the_prior_of_plain_steps_finds_the_target_in_the_caches(prior: GoodputPrior) -> None:
    warm = predicted_goodput(replace(LATENCY, plain_share=0.5), CHAINS, 0)
    assert warm.seconds(3, 0) == pytest.approx(0.006)
    assert warm.seconds(3, 1) == prior.seconds(3, 1)


@pytest.fixture
def prior() -> GoodputPrior:
    return predicted_goodput(LATENCY, CHAINS, 0)


def tokens(budgets: list[Budget]) -> list[tuple[int, int]]:
    """Verified drafts and prompt tokens."""
    return [(budget.verified, budget.prompt_tokens) for budget in budgets]


def test_a_budget_fills_a_graph(prior: GoodputPrior) -> None:
    """7 rows at gamma 2 are 21 tokens: one draft fills the graph of 8, 9 the one of 16."""
    assert tokens(prior.budgets(7, 2)) == [(1, 0), (9, 0), (14, 0)]
    assert tokens(prior.budgets(7, 2, drafts=9)) == [(1, 0), (9, 0)]  # some rows have fewer
    assert tokens(prior.budgets(7, 1)) == [(1, 0), (7, 0)]
    assert tokens(prior.budgets(9, 0)) == [(0, 0)]  # no narrower graph holds the roots
    seconds = [budget.seconds for budget in prior.budgets(7, 1)]
    assert seconds == pytest.approx([prior.seconds(7, 1, 1), prior.seconds(7, 1)])


@pytest.mark.parametrize(("drafts_max", "verified"), [(10, [1, 9, 10]), (9, [1, 9]), (0, [0])])
def test_a_budget_is_never_more_than_can_be_verified(
    prior: GoodputPrior, drafts_max: int, verified: list[int]
) -> None:
    assert [budget.verified for budget in prior.budgets(7, 2, drafts_max=drafts_max)] == verified


def test_gamma_max_of_a_load_is_the_depth_at_which_all_drafts_are_verified() -> None:
    assert [Load(5, deepest, drafts_max=12).gamma_max for deepest in (1, 2, 3)] == [1, 2, 2]
    assert Load(5, 3).gamma_max == 3


def test_a_budget_leaves_room_for_waiting_prompts(prior: GoodputPrior) -> None:
    """4 rows and 3 prompt tokens: 9 drafts fill the graph of 16; all 12 would leave no room."""
    assert tokens(prior.budgets(4, 3, waiting=3)) == [(1, 3), (9, 3), (12, 0)]


@given(st.integers(0, 127), st.integers(0, 400))
def test_prompts_never_take_more_than_waits_or_than_a_graph_holds(num_tokens: int, wanted: int) -> None:
    taken = prompt_budget((2, 4, 8, 16, 24, 32, 48, 64, 128), num_tokens, wanted)
    assert 0 <= taken <= min(wanted, 128 - num_tokens)
    assert taken > 0 or wanted == 0


def test_a_few_prompt_tokens_that_fit_do_not_widen_the_graph() -> None:
    assert prompt_budget((48, 64, 128), 43, 5) == 5


def test_chains_longer_than_the_calibrated_ones_are_not_expected_to_emit_more(prior: GoodputPrior) -> None:
    assert [prior.emitted(gamma) for gamma in range(5)] == [1.0, 1.6, 1.9, 1.9, 1.9]


def test_the_selection_gain_is_that_of_the_calibration_text() -> None:
    """One draft per row: the first of every row accept 0.6 per row, the likeliest of the batch 0.75.

    At gamma 1 the first tokens are all tokens, so nothing is gained.
    """
    calibrated = dataclasses.replace(
        CHAINS, pooled=((0.0, 0.2, 0.4, 0.5, 0.6), (0.0, 0.2, 0.4, 0.6, 0.75, 0.8, 0.85, 0.9, 0.9))
    )
    gain = predicted_goodput(LATENCY, calibrated, 0).selection_gain
    assert gain(2, 1.0) == pytest.approx(0.75 / 0.6)
    assert gain(2, 1.5) == pytest.approx(0.85 / 0.75)
    assert [gain(gamma, gamma) for gamma in (1, 2)] == pytest.approx([1.0, 1.0])
    assert gain(2, 0.5) == pytest.approx(0.4 / 0.3)
    assert gain(0, 0.0) == predicted_goodput(LATENCY, CHAINS, 0).selection_gain(2, 1.0) == 1.0


def test_a_pair_calibrated_without_chains_has_no_prior() -> None:
    with pytest.raises(ConfigError, match="width 1"):
        predicted_goodput(LATENCY, Acceptance((-1.0, 0.0), (0.0, 1.0), {2: ((1.0, 1.6),)}), 0)


Step = tuple[int, int, float, int, bool, int | None]
STEPS = st.lists(
    st.tuples(
        st.integers(1, MAX_BATCH),
        st.integers(0, GAMMA_MAX),
        st.floats(0.001, 1.0),
        st.integers(0, GAMMA_MAX),
        st.booleans(),
        st.none() | st.integers(0, 40),
    ),
    max_size=40,
)


def choices(name: str, steps: list[Step]) -> list[int]:
    """The arms that a new policy selects; steps that are not observed have no outcome."""
    policy = gamma_policy(name, PARTS)
    chosen = []
    previous = 0
    lag = 0
    for batch_size, deepest, seconds, luck, observed, drafts_max in steps:
        load = Load(batch_size, deepest, previous, lag, drafts_max=drafts_max)
        choice = policy.choose(load)
        gamma = max(shape.depth for shape in choice.shapes)
        assert 0 <= gamma <= deepest
        assert len(choice.shapes) == batch_size
        assert list(choice.menu.nodes) == sorted(set(choice.menu.nodes))
        values = [[0.7 ** (index + 1) for index in range(gamma)]] * batch_size
        sums = [0.0, *accumulate(sorted((value for row in values for value in row), reverse=True))]
        verified = choice.menu.best(sums, num_rows=batch_size, depth=gamma)
        assert 0 <= verified <= batch_size * gamma
        assert drafts_max is None or verified <= drafts_max
        even, more = divmod(verified, batch_size)
        drafted = [even + (row < more) for row in range(batch_size)]
        if observed:
            emitted = [1 + min(luck, count) for count in drafted]
            policy.observe(Outcome(load, gamma, drafted, emitted, seconds, values=values))
        chosen = [*chosen, gamma]
        previous = gamma
        lag = 0 if gamma else lag + 1
    json.dumps(policy.state, allow_nan=False)
    return chosen


@pytest.mark.parametrize("name", EVERY_POLICY)
@given(steps=STEPS)
@settings(max_examples=25, deadline=None)
def test_every_policy_selects_legal_arms_and_repeats_them_with_the_same_seed(
    name: str, steps: list[Step]
) -> None:
    assert choices(name, steps) == choices(name, steps)
