"""Policies of speculative lengths but Nightjar's, on traces computed by hand; what holds for every policy,
on random loads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import ConfigError
from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.adabingreedy import AdaBinGreedy
from yggdrasil.policy.gamma.banditspec import BanditSpec
from yggdrasil.policy.gamma.budget import prompt_room
from yggdrasil.policy.gamma.dsd import DSD
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.linear import LinThompson, LinUCB
from yggdrasil.policy.gamma.prior import GoodputPrior
from yggdrasil.policy.gamma.protocol import Load, Outcome
from yggdrasil.policy.gamma.registry import POLICIES, PolicyParts, gamma_policy, predicted_goodput
from yggdrasil.policy.gamma.tetris import Tetris
from yggdrasil.policy.gamma.tiers import AdaptiveTiers, TierConfig
from yggdrasil.policy.latency import Curve, LatencyModel

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
    """A random generator that draws the given numbers."""

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
    return Outcome(
        Load(batch_size, gamma_max), gamma, [gamma] * batch_size, [1] * batch_size, batch_size / goodput
    )


def accepted(gamma: int, *by_row: int) -> Outcome:
    """A step of 10 ms whose rows accepted `accepted` of gamma draft tokens."""
    return Outcome(
        Load(len(by_row), GAMMA_MAX), gamma, [gamma] * len(by_row), [1 + count for count in by_row], 0.01
    )


def test_a_fixed_gamma_is_clipped_to_what_the_menu_holds() -> None:
    assert [FixedGamma(3).select(Load(8, gamma_max)) for gamma_max in (0, 2, 3, 7)] == [0, 2, 3, 3]


def test_tetris_verifies_its_share_of_the_batch_s_draft_tokens_rounded_up() -> None:
    policy = Tetris(5, share=0.6)
    assert policy.select(Load(4, 7)) == 5
    assert [
        policy.verified(Load(batch_size, 7), 5, [[0.5] * 5] * batch_size) for batch_size in (1, 2, 3, 4)
    ] == [3, 6, 9, 12]
    assert policy.verified(Load(3, 7), 4, [[0.5] * 4] * 3) == 8  # 7.2 of 12


def test_a_tetris_share_that_verifies_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="share"):
        Tetris(5, share=0.0)


def test_ada_bingreedy_shares_one_clock_and_one_mean_among_batch_sizes() -> None:
    """Rounds 1-4 explore (bins whose type is certain), 5-6 are the second bin of block 3: 0.71 is above 1 /
    sqrt(2).
    """
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


def test_dsd_recovers_a_linear_latency_and_maximises_modelled_goodput() -> None:
    """Rate 0.5, B = 1: 1/10.1, 1.5/11.2, 1.75/12.3 and 1.875/13.4 per ms; B = 100: 1/20, 1.5/31."""
    policy = DSD(POINTS, rate=0.5)
    assert policy.coefficients == pytest.approx([0.01, 0.001, 0.0001])
    assert policy.select(Load(1, 3)) == 2
    assert policy.select(Load(100, 1)) == 0


def test_dsd_averages_the_acceptance_rate_over_decided_tokens_and_learns_nothing_without_drafts() -> None:
    """Two accepted and one rejected: what follows a rejection was decided by it."""
    policy = DSD(POINTS, rate=0.9)
    policy.observe(accepted(2, 2, 0))
    assert policy.rate == pytest.approx(0.9 + 0.1 * (2 / 3 - 0.9))
    policy.observe(accepted(0, 0, 0))
    assert policy.rate == pytest.approx(0.9 + 0.1 * (2 / 3 - 0.9))


def test_banditspec_tries_every_arm_once_and_then_follows_ucb1() -> None:
    """t = 3, best 200: 100/200 + sqrt(2 ln 3) = 1.98 against 150/200 + sqrt(ln 3) = 1.80."""
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
    assert policy.select(load) == 0  # 0.667 + 0.816 against 0.633 + 0.816
    policy.observe(outcome(0, 200.0, batch_size=MAX_BATCH))
    # 0.8 + 0.632 against 0.633 + 0.816; with half a deviation it would be 0.8 + 0.316 against 0.633 + 0.408
    assert policy.select(load) == 1


def test_linear_thompson_draws_from_the_same_posterior() -> None:
    """Means 2/3 and 1/3, deviations 0.5 * 0.816: only a draw of more than 0.816 lifts the second arm over
    the first.
    """
    # type: ignore[arg-type]
    policy = LinThompson(1, MAX_BATCH, Script(normals=[[0.0, 0.8], [0.0, 0.85]]))
    load = Load(MAX_BATCH, 1)
    for gamma, goodput in enumerate((100.0, 50.0)):
        assert policy.select(load) == gamma  # every arm once
        policy.observe(outcome(gamma, goodput, batch_size=MAX_BATCH))
    assert [policy.select(load), policy.select(load)] == [0, 1]


@pytest.mark.parametrize("name", ["nightjar-printed", "banditspec", "linucb", "lints", "ada-bingreedy"])
def test_a_reward_is_not_learnt_from_a_step_that_computed_prompts_as_well(name: str) -> None:
    policy = gamma_policy(name, PARTS)
    fresh = gamma_policy(name, PARTS)
    policy.observe(dataclasses.replace(outcome(2, 100.0), prompt_tokens=5))
    assert policy.state == fresh.state


@pytest.mark.parametrize("name", ["nightjar", "dsd", "tiers"])
def test_acceptance_is_learnt_next_to_prompts_too(name: str) -> None:
    policy = gamma_policy(name, PARTS)
    fresh = gamma_policy(name, PARTS)
    policy.observe(dataclasses.replace(accepted(3, 2, 1), prompt_tokens=5))
    assert policy.state != fresh.state


def test_tiers_move_after_the_warm_up_at_every_interval_and_down_to_the_average() -> None:
    """Three accepted: the average 3 is above 3 - 0.5 at batch 15. Then none: 3 * 0.8^5 = 0.98 at 20, 0.32
    at 25 and 0.11 at 30; bounds 2.25 and 0.25.
    """
    policy = AdaptiveTiers(TierConfig())
    tiers = []
    for batch in range(1, 31):
        policy.observe(
            accepted(policy.num_steps, 3, 3) if batch <= 15 else accepted(policy.num_steps, 0, 0)
        )
        tiers.append(policy.num_steps)
    assert tiers == [3] * 14 + [7] * 5 + [3] * 10 + [1]
    assert policy.state == {"speculative_num_steps": 1, "avg_spec_accept_length": round(3 * 0.8**15, 4)}


def test_the_average_of_the_tiers_is_over_rows_and_then_over_batches() -> None:
    policy = AdaptiveTiers(TierConfig())
    policy.observe(accepted(3, 1, 3))  # starts at the batch's mean, 2
    policy.observe(accepted(3, 3, 3))
    policy.observe(accepted(0, 0, 0))  # drafted nothing: no batch
    assert policy.accepted == pytest.approx(2.2)
    assert policy.batches == 2


def immediate(**hysteresis: float) -> TierConfig:
    return TierConfig(warmup_batches=0, update_interval=1, ema_alpha=1.0, **hysteresis)


def test_hysteresis_delays_a_tier_both_ways() -> None:
    down = AdaptiveTiers(immediate(), initial_steps=7)
    down_at_once = AdaptiveTiers(immediate(down_hysteresis=0.0), initial_steps=7)
    up = AdaptiveTiers(immediate())
    up_later = AdaptiveTiers(immediate(up_hysteresis=0.5))
    for policy in (down, down_at_once):
        policy.observe(accepted(7, 3, 2, 2, 2))  # 2.25 <= 3 - 0.5 - 0.25
    assert (down.num_steps, down_at_once.num_steps) == (3, 3)
    down = AdaptiveTiers(immediate(), initial_steps=7)
    down_at_once = AdaptiveTiers(immediate(down_hysteresis=0.0), initial_steps=7)
    for policy in (down, down_at_once):
        policy.observe(accepted(7, 3, 2))  # 2.5 <= 3 - 0.5, not <= 2.25
    assert (down.num_steps, down_at_once.num_steps) == (7, 3)
    for policy in (up, up_later):
        policy.observe(accepted(3, 3, 3))  # 3 > 2.5, not > 3
    assert (up.num_steps, up_later.num_steps) == (7, 3)


def test_a_collapse_of_acceptance_steps_down_several_tiers_at_once() -> None:
    policy = AdaptiveTiers(immediate(), initial_steps=7)
    policy.observe(accepted(7, 0, 0))
    assert policy.num_steps == 1


def test_the_first_tier_is_the_one_nearest_to_the_given_steps() -> None:
    assert [AdaptiveTiers(TierConfig(), initial_steps=steps).num_steps for steps in (1, 3, 4, 6, 20)] == [
        1,
        3,
        3,
        7,
        7,
    ]


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
def test_a_tier_config_names_the_field_that_is_wrong(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TierConfig(**wrong)  # type: ignore[arg-type]


def test_tiers_are_read_from_a_file_whose_unknown_keys_are_errors(tmp_path: Path) -> None:
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
def test_a_tier_file_that_cannot_be_used_is_an_error_with_its_path(
    content: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "tiers.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"tiers\.json"):
        gamma_policy(f"tiers:{path}", PARTS)


@pytest.mark.parametrize("name", ["ucb", "", "fixed", "fixed-0", "fixed-6", "fixed-x", "tiers:", "off-1"])
def test_an_unknown_policy_is_an_error_that_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="one of nightjar, nightjar-printed, off"):
        gamma_policy(name, PARTS)


def test_the_catalog_builds_what_it_names() -> None:
    assert gamma_policy("fixed-5", PARTS).select(Load(1, 5)) == 5
    assert gamma_policy("off", PARTS).select(Load(1, 5)) == 0
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


def test_the_prior_adds_draft_forwards_verification_and_host() -> None:
    """B = 5 at gamma 2: each draft forward is a graph of 4 and one of 2, 3 ms, and 0.5 ms of host; 15
    tokens are verified in 14 ms; 2 ms.
    """
    prior = predicted_goodput(LATENCY, CHAINS, 0)
    assert prior.seconds(5, 2) == pytest.approx(0.023)
    assert prior.seconds(3, 0) == pytest.approx(0.011)
    assert prior.seconds(5, 3) == pytest.approx(0.0365)  # 20 tokens are a graph of 16 and one of 4
    # drafted as many, 16 tokens
    assert prior.seconds(5, 2, verified=3, prompt_tokens=8) == pytest.approx(0.023)
    assert prior.seconds(5, 2, verified=3) == pytest.approx(0.020)  # 8 tokens


def test_a_budget_fills_a_graph() -> None:
    """7 rows at gamma 2 are 21 tokens: one draft fills the graph of 8, 9 the one of 16."""
    prior = predicted_goodput(LATENCY, CHAINS, 0)
    assert [(budget.verified, budget.prompt_tokens) for budget in prior.budgets(7, 2)] == [
        (1, 0),
        (9, 0),
        (14, 0),
    ]
    # some rows have fewer
    assert [(budget.verified, budget.prompt_tokens) for budget in prior.budgets(7, 2, drafts=9)] == [
        (1, 0),
        (9, 0),
    ]
    assert [(budget.verified, budget.prompt_tokens) for budget in prior.budgets(7, 1)] == [(1, 0), (7, 0)]
    # no narrower graph holds the roots
    assert [(budget.verified, budget.prompt_tokens) for budget in prior.budgets(9, 0)] == [(0, 0)]
    assert [budget.seconds for budget in prior.budgets(7, 1)] == pytest.approx(
        [prior.seconds(7, 1, 1), prior.seconds(7, 1)]
    )


def test_a_budget_is_never_more_than_can_be_verified() -> None:
    prior = predicted_goodput(LATENCY, CHAINS, 0)
    assert [budget.verified for budget in prior.budgets(7, 2, most=10)] == [1, 9, 10]
    assert [budget.verified for budget in prior.budgets(7, 2, most=9)] == [1, 9]
    assert [budget.verified for budget in prior.budgets(7, 2, most=0)] == [0]


def test_a_load_says_how_deep_drafts_go_that_are_all_verified() -> None:
    assert [Load(5, deepest, drafts_max=12).gamma_max for deepest in (1, 2, 3)] == [1, 2, 2]
    assert Load(5, 3).gamma_max == 3


def test_a_budget_leaves_the_prompts_that_wait_their_room() -> None:
    """4 rows and 3 tokens of prompts: 9 drafts fill the graph of 16; all 12 would leave no room."""
    prior = predicted_goodput(LATENCY, CHAINS, 0)
    assert [(budget.verified, budget.prompt_tokens) for budget in prior.budgets(4, 3, waiting=3)] == [
        (1, 3),
        (9, 3),
        (12, 0),
    ]


@given(st.integers(0, 127), st.integers(0, 400))
def test_prompts_never_take_more_than_waits_or_than_a_graph_holds(num_tokens: int, wanted: int) -> None:
    room = prompt_room((2, 4, 8, 16, 24, 32, 48, 64, 128), num_tokens, wanted)
    assert 0 <= room <= min(wanted, 128 - num_tokens)
    assert room > 0 or wanted == 0


def test_a_graph_is_not_widened_for_a_few_tokens_that_fit_next_to_it() -> None:
    assert prompt_room((48, 64, 128), 43, 5) == 5


def test_the_prior_expects_no_more_from_chains_longer_than_the_calibrated_ones() -> None:
    prior = predicted_goodput(LATENCY, CHAINS, 0)
    assert [prior.emitted(gamma) for gamma in range(5)] == [1.0, 1.6, 1.9, 1.9, 1.9]


def test_what_picking_is_worth_is_what_it_brought_on_the_calibration_text() -> None:
    """One draft a row: every row's first accepts 0.6 a row, the likeliest of all 0.75; all first ones are
    all there are at gamma 1.
    """
    calibrated = dataclasses.replace(
        CHAINS, pooled=((0.0, 0.2, 0.4, 0.5, 0.6), (0.0, 0.2, 0.4, 0.6, 0.75, 0.8, 0.85, 0.9, 0.9))
    )
    prior = predicted_goodput(LATENCY, calibrated, 0)
    assert prior.picking(2, 1.0) == pytest.approx(0.75 / 0.6)
    assert prior.picking(2, 1.5) == pytest.approx(0.85 / 0.75)
    assert [prior.picking(gamma, gamma) for gamma in (1, 2)] == pytest.approx([1.0, 1.0])
    assert prior.picking(2, 0.5) == pytest.approx(0.4 / 0.3)
    assert prior.picking(0, 0.0) == predicted_goodput(LATENCY, CHAINS, 0).picking(2, 1.0) == 1.0


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
    """What a new policy selects; a step that is not observed computed prompts as well."""
    policy = gamma_policy(name, PARTS)
    chosen = []
    previous = 0
    lag = 0
    for batch_size, deepest, seconds, luck, observed, drafts_max in steps:
        load = Load(batch_size, deepest, previous, lag, drafts_max=drafts_max)
        gamma = policy.select(load)
        assert 0 <= gamma <= deepest
        values = [[0.7 ** (index + 1) for index in range(gamma)]] * batch_size
        verified = policy.verified(load, gamma, values)
        assert 0 <= verified <= batch_size * gamma
        assert drafts_max is None or verified <= drafts_max
        even, more = divmod(verified, batch_size)
        drafted = [even + (row < more) for row in range(batch_size)]
        if observed:
            policy.observe(
                Outcome(
                    load,
                    gamma,
                    drafted,
                    [1 + min(luck, count) for count in drafted],
                    seconds,
                    values=values,
                )
            )
        chosen = [*chosen, gamma]
        previous = gamma
        lag = 0 if gamma else lag + 1
    json.dumps(policy.state, allow_nan=False)
    return chosen


@pytest.mark.parametrize("name", EVERY_POLICY)
@given(steps=STEPS)
@settings(max_examples=25, deadline=None)
def test_every_policy_selects_a_legal_arm_has_a_json_state_and_repeats_itself_with_its_seed(
    name: str, steps: list[Step]
) -> None:
    assert choices(name, steps) == choices(name, steps)
