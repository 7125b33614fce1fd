"""Nightjar as printed and its variant, on traces computed by hand and on the trace of DSD's deadlock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest

from yggdrasil.policy.gamma.bins import BinClock, MeanGoodput
from yggdrasil.policy.gamma.budget import PROMPT_VALUE, draft_budget
from yggdrasil.policy.gamma.estimates import GraphSeconds, PositionAcceptance, StepSeconds, ValueScale
from yggdrasil.policy.gamma.nightjar import Nightjar, PrintedNightjar
from yggdrasil.policy.gamma.prior import Budget, GoodputPrior
from yggdrasil.policy.gamma.protocol import BatchPolicy, ChainPolicy, Load, Outcome
from yggdrasil.policy.gamma.registry import PolicyParts, gamma_policy

# (block, bin, round): bins of floor(sqrt(H)) rounds, as many to a block, H = 1, 2, 4, 8, 16
FIRST_22_ROUNDS = [
    *((1, 1, 1), (2, 1, 1)),
    *((3, 1, 1), (3, 1, 2), (3, 2, 1), (3, 2, 2)),
    *((4, 1, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2)),
    *((5, 1, 1), (5, 1, 2), (5, 1, 3), (5, 1, 4)),
    *((5, 2, 1), (5, 2, 2), (5, 2, 3), (5, 2, 4)),
    *((5, 3, 1), (5, 3, 2), (5, 3, 3), (5, 3, 4)),
]


class Script:
    """A random generator that draws given numbers and fails when they run out."""

    def __init__(self, uniforms: list[float], arms: list[int]) -> None:
        self.uniforms = iter(uniforms)
        self.arms = iter(arms)

    def random(self) -> float:
        return next(self.uniforms)

    def integers(self, bound: int) -> int:
        return next(self.arms)


def free(lag: int, batch_size: int) -> float:
    return 0.0


def printed(
    uniforms: list[float], arms: list[int], cost: Callable[[int, int], float] = free
) -> PrintedNightjar:
    return PrintedNightjar(cost, Script(uniforms, arms))  # type: ignore[arg-type]


def run_step(policy: ChainPolicy, goodputs: dict[int, float], load: Load) -> int:
    """Select, and observe the arm's goodput, one token a row."""
    gamma = policy.select(load)
    rows = load.batch_size
    policy.observe(Outcome(load, gamma, [gamma] * rows, [1] * rows, rows / goodputs[gamma]))
    return gamma


def test_blocks_and_bins_follow_algorithm_1_for_22_rounds() -> None:
    clock = BinClock()
    seen = []
    for _ in FIRST_22_ROUNDS:
        seen.append((clock.block, clock.bin, clock.round))
        clock.tick_()
    assert seen == FIRST_22_ROUNDS
    assert (clock.block, clock.bin, clock.round) == (5, 4, 1)


def test_the_type_of_a_bin_is_drawn_once() -> None:
    clock = BinClock()
    script = Script([0.5], [])
    assert [clock.explores(script) for _ in range(3)] == [True] * 3  # type: ignore[arg-type]


def test_the_printed_nightjar_explores_whole_bins_and_exploits_between_them() -> None:
    """First bins always explore, second ones below 1 / sqrt(2) = 0.707, third ones below 0.577.

    The best arm is 1.
    """
    uniforms = [0.99, 0.99, 0.99, 0.71, 0.99, 0.70, 0.99, 0.80, 0.57]
    policy = printed(uniforms, [0, 1, 2, 0, 1, 1, 2, 0, 0, 0, 0, 0, 2, 2, 2, 2])
    chosen = [run_step(policy, {0: 100.0, 1: 300.0, 2: 200.0}, Load(1, 2, 1)) for _ in FIRST_22_ROUNDS]
    assert chosen == [0, 1, 2, 0, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_every_batch_size_has_its_own_clock_and_means() -> None:
    policy = printed([0.0] * 4, [2, 1, 0, 0])
    for batch_size in (1, 8, 1, 8):
        run_step(policy, {0: 100.0, 1: 300.0, 2: 200.0}, Load(batch_size, 2, 1))
    assert policy.state["batch_sizes"] == {
        "1": {"block": 3, "gamma": 2, "tok_per_s": 200.0, "rounds": {"0": 1, "2": 1}},
        "8": {"block": 3, "gamma": 1, "tok_per_s": 300.0, "rounds": {"0": 1, "1": 1}},
    }


def test_a_step_that_is_not_observed_moves_no_counter() -> None:
    policy = printed([0.0, 0.0], [0, 1, 2, 0])
    # in an exploring round, every call draws a new arm
    assert [policy.select(Load(1, 2)) for _ in range(3)] == [0, 1, 2]
    assert (policy.clocks[1].block, policy.clocks[1].round) == (1, 1)


def explored(cost: Callable[[int, int], float] = free) -> PrintedNightjar:
    """A policy that exploits next, after 10, 5 and 5.56 ms per token (100, 200, 180 tokens/s) at B = 2."""
    policy = printed([0.0, 0.0, 0.0, 0.99], [0, 1, 2, 0], cost)
    for _ in range(4):
        run_step(policy, {0: 100.0, 1: 200.0, 2: 180.0}, Load(2, 2))
    return policy


def test_eq_3_without_switching_cost_takes_the_largest_mean_goodput() -> None:
    assert explored().select(Load(2, 2, previous_gamma=0)) == 1


@pytest.mark.parametrize(("cost_ms", "gamma"), [(4, 2), (8, 2), (12, 0), (1, 1)])
def test_eq_3_divides_the_switching_cost_by_gamma(cost_ms: float, gamma: int) -> None:
    """ms per token at gamma 1, 2, 0: 5 + 4, 5.56 + 2, 10; then 13, 9.56, 10; 17, 11.56, 10; 6, 6.06, 10."""
    policy = explored(lambda lag, batch_size: cost_ms / 1e3)
    assert policy.select(Load(2, 2, previous_gamma=0, max_lag=5)) == gamma


def test_eq_3_adds_the_switching_cost_only_after_a_step_without_the_draft() -> None:
    calls = []

    def cost(lag: int, batch_size: int) -> float:
        calls.append((lag, batch_size))
        return 1.0

    policy = explored(cost)
    calls.clear()
    assert policy.select(Load(2, 2, previous_gamma=1, max_lag=0)) == 1
    assert calls == []
    assert policy.select(Load(2, 2, previous_gamma=0, max_lag=7)) == 0
    assert calls == [(7, 2)]


def test_an_arm_that_never_ran_costs_infinity_and_the_draft_stays_off_if_none_ran() -> None:
    policy = printed([0.0, 0.0, 0.0, 0.99], [2, 2, 2, 2])
    for _ in range(4):
        run_step(policy, {2: 50.0}, Load(1, 2))
    assert policy.select(Load(1, 2, 1)) == 2
    assert policy.select(Load(1, 1, 1)) == 0  # the menu holds fewer drafts now, and neither 0 nor 1 has run


def test_the_mean_is_incremental() -> None:
    goodput = MeanGoodput()
    for value in (100.0, 200.0, 600.0):
        goodput.add_(1, value)
    assert goodput.means[1] == pytest.approx(300.0)
    assert goodput.seconds_per_token(1) == pytest.approx(1 / 300)
    assert goodput.seconds_per_token(0) == float("inf")


PRIOR = GoodputPrior(
    drafting=lambda batch_size, gamma: 0.001 * gamma,
    verifying=lambda tokens: 0.010,
    emitted=lambda gamma: [1.0, 1.5, 1.75, 1.875][gamma],
)


def variant(cost: Callable[[int, int], float] = free, gamma_max: int = 2) -> Nightjar:
    return Nightjar(PRIOR, cost, gamma_max=gamma_max)


def test_acceptance_is_learnt_by_position_and_carries_over_to_the_next_one() -> None:
    """One of two accepted: position 1 is (16 * 0.5 + 1) / 17; position 2 starts there and fails once."""
    acceptance = PositionAcceptance(PRIOR, 3)
    assert acceptance.emitted == pytest.approx([1.0, 1.5, 1.75, 1.875])
    acceptance.observe_([2], [2])
    first = 9 / 17
    second = 16 * first / 17
    assert acceptance.rates == pytest.approx([first, second, second])
    assert acceptance.emitted == pytest.approx(
        [1, 1 + first, 1 + first + first * second, 1 + first + first * second + first * second * second]
    )


def test_a_row_with_fewer_drafts_does_not_count_at_later_positions() -> None:
    acceptance = PositionAcceptance(PRIOR, 3)
    acceptance.observe_([1, 2, 0], [2, 3, 1])
    assert acceptance.rates[0] == pytest.approx(10 / 18)  # two trials, both accepted
    assert acceptance.rates[1] == pytest.approx((16 * 0.5 * (10 / 18 / 0.5) + 1) / 17)  # one trial


def test_a_slow_step_corrects_its_arm_and_less_the_same_gamma_at_other_batch_sizes() -> None:
    seconds = StepSeconds(2)
    seconds.observe_(1, 2, 2.0)
    assert seconds.corrections(8) == pytest.approx([1, 1, 1.5])  # (1 + 2) / 2
    assert seconds.corrections(1) == pytest.approx([1, 1, 1.75])  # (1.5 + 2) / 2
    assert seconds.steps(1) == [0, 0, 1]


STAIRS = GoodputPrior(
    drafting=lambda batch_size, gamma: 0.001 * gamma,
    verifying=lambda tokens: 0.010 if tokens <= 16 else 0.020,
    emitted=lambda gamma: [1.0, 1.8, 2.4][gamma],
    widths=(8, 16, 32),
)


def verified(policy: Nightjar, load: Load, gamma: int, values: Sequence[Sequence[float]]) -> int:
    """The number of drafts that the policy's menu verifies at these values."""
    menu = policy.menu(load, gamma, sum(map(len, values)))
    return menu.best(likeliest_sums(values), num_rows=load.batch_size, depth=gamma)


def likeliest_sums(values: Sequence[Sequence[float]]) -> list[float]:
    """The acceptance of the n likeliest drafts together, for every n."""
    return [0.0, *accumulate(sorted((value for row in values for value in row), reverse=True))]


def test_the_variant_leaves_out_drafts_that_would_need_the_next_graph() -> None:
    """12 rows: all drafts 21.6 tokens in 21 ms, 4 that fill the graph 15.2 in 11 ms, none 12 in 10 ms."""
    policy = Nightjar(STAIRS, free, gamma_max=1)
    load = Load(12, 1, previous_gamma=1)
    assert policy.select(load) == 1
    assert verified(policy, load, 1, [[0.8]] * 12) == 4
    assert verified(policy, Load(8, 1), 1, [[0.8]] * 8) == 8  # here all fit


def test_every_load_of_a_server_is_predicted_before_the_first_step() -> None:
    """Predicting a load takes ten times as long as a selection."""
    policy = Nightjar(STAIRS, free, gamma_max=2, max_batch=6)
    predicted = policy._ways.cache_info().misses
    assert predicted == 6 * 5  # 0, 8, 16, 24 and 32 prompt tokens
    for batch_size, waiting in product(range(1, 7), range(33)):
        drafts_max = draft_budget(STAIRS.widths, batch_size, waiting)
        policy.select(Load(batch_size, 2, waiting_tokens=waiting, drafts_max=drafts_max))
    assert policy._ways.cache_info().misses == predicted


def test_the_variant_drafts_deeper_than_the_menu_verifies() -> None:
    """The graph of 32 holds 20 rows and 12 drafts: the likeliest 12 of 40 are better than those of 20."""

    def gain(gamma: int, drafts_per_row: float) -> float:
        return 1.0 + 0.2 * (gamma - 1)

    policy = Nightjar(replace(STAIRS, selection_gain=gain), free, gamma_max=2)
    load = Load(20, 2, previous_gamma=2, drafts_max=12)
    assert load.gamma_max == 0
    assert policy.select(load) == 2
    assert verified(policy, load, 2, [[0.9, 0.8]] * 20) == 12


def test_the_graph_is_chosen_again_by_the_draft_s_probabilities() -> None:
    """8 of 16 drafts fill the graph of 16; whether the graph of 32 is better depends on the other 8."""
    policy = Nightjar(STAIRS, free, gamma_max=2)
    load = Load(8, 2, previous_gamma=2)
    assert verified(policy, load, 2, [[0.9, 0.1]] * 8) == 8
    flat = replace(STAIRS, verifying=lambda tokens: 0.010 if tokens <= 16 else 0.012)
    sure = Nightjar(flat, free, gamma_max=2)
    assert verified(sure, load, 2, [[0.9, 0.8]] * 8) == 16  # 8 + 13.6 in 14 ms, better than 8 + 7.2 in 12
    assert verified(sure, load, 2, [[0.9, 0.1]] * 8) == 8  # 8 + 8 in 14 ms
    sure.values.observe_([2] * 8, [1] * 8, [[0.9, 0.8]] * 8)  # nothing was accepted
    assert sure.values.estimate == pytest.approx(16 / (16 + 13.6))


def test_the_menu_chooses_the_best_of_all_budgets_on_random_values() -> None:
    random = np.random.default_rng(0)
    widths = tuple(range(4, 33, 4))
    prior = replace(STAIRS, verifying=lambda tokens: 0.010 + 0.0005 * tokens, widths=widths)
    chosen = set()
    for _ in range(500):
        policy = Nightjar(prior, free, gamma_max=2)
        policy.graphs.corrections = dict(zip(widths, random.uniform(0.5, 2.0, 8), strict=True))
        rows = int(random.integers(1, 21))
        waiting = int(random.integers(0, 12)) if random.random() < 0.5 else 0
        load = Load(rows, 2, waiting_tokens=waiting, drafts_max=int(random.integers(0, 32 - rows)))
        values = [np.cumprod(random.uniform(size=random.integers(3))).tolist() for _ in range(rows)]
        policy.values.observe_([len(row) for row in values], [2] * rows, values)
        number, place, count = best_budget(policy, prior, load, values)
        assert verified(policy, load, 2, values) == number
        chosen.add((place, count))
    assert chosen > {(place, count) for count in (1, 2, 3) for place in range(count)}


def best_budget(
    policy: Nightjar, prior: GoodputPrior, load: Load, values: Sequence[Sequence[float]]
) -> tuple[int, int, int]:
    """The drafts of the budget with most tokens, prompts included, per corrected second.

    Returns:
        Their number, the place of the budget, and the number of budgets.
    """
    sums = likeliest_sums(values)
    budgets = prior.budgets(load.batch_size, 2, load.waiting_tokens, len(sums) - 1, load.drafts_max)

    def goodput(budget: Budget) -> float:
        width = prior.width(load.batch_size + budget.verified + budget.prompt_tokens)
        accepted = policy.values.estimate * sums[budget.verified]
        tokens = load.batch_size + accepted + PROMPT_VALUE * budget.prompt_tokens
        return tokens / (budget.seconds * policy.graphs.corrections[width])

    best = max(budgets, key=goodput)
    return best.verified, budgets.index(best), len(budgets)


def test_the_time_of_drafting_is_part_of_the_menu() -> None:
    """8 rows: 8 drafts fill the graph of 16 in 10 ms, 16 need that of 32; drafting 2 tokens takes 2 ms."""
    menu = Nightjar(STAIRS, free, gamma_max=2).menu(Load(8, 2), 2, 16)
    assert menu.nodes == (8, 16)
    assert menu.ms == pytest.approx((12.0, 22.0))
    assert menu.growth_ms == 0


def test_the_selection_gain_of_an_arm_grows_with_the_number_of_rows() -> None:
    """4 of 12 drafts fill the graph. With gain 1 a row emits 1 + 0.8 / 3 tokens.

    A gain of 2 in a large batch is 1 + 11 / 12 in 12 rows: 1 + (1 + 11 / 12) * 0.8 / 3.
    """

    def gain(gamma: int, drafts_per_row: float) -> float:
        return 2.0 if drafts_per_row < gamma else 1.0

    policy = Nightjar(replace(STAIRS, selection_gain=gain), free, gamma_max=1)
    policy.observe(Outcome(Load(12, 1, previous_gamma=1), 0, [0] * 12, [1] * 12, 0.010))
    goodput = policy.state["batch_sizes"]["12"]["tok_per_s"]
    assert goodput == pytest.approx(12 * (1 + 23 / 12 * 0.8 / 3) / 0.011, abs=0.01)


def test_acceptance_of_selected_rows_is_scaled_to_all_rows() -> None:
    """Two of four rows are verified at position 1 and accept; the mean expected of all four is half."""
    picked = PositionAcceptance(PRIOR, 3)
    all_alike = PositionAcceptance(PRIOR, 3)
    picked.observe_([1, 1, 0, 0], [2, 2, 1, 1], [[0.8], [0.8], [0.0], [0.0]])
    all_alike.observe_([1, 1, 0, 0], [2, 2, 1, 1], [[0.8]] * 4)
    assert picked.rates[0] == pytest.approx((16 * 0.5 + 2 * 0.5) / 18)
    assert all_alike.rates[0] == pytest.approx((16 * 0.5 + 2) / 18)


def test_a_row_that_failed_counts_as_no_accepted_token() -> None:
    scale = ValueScale()
    scale.observe_([2], [0], [[0.9, 0.8]])
    assert scale.estimate == pytest.approx(16 / (16 + 1.7))


def test_the_weight_of_old_values_fades() -> None:
    scale = ValueScale()
    for _ in range(100):
        scale.observe_([4], [3], [[0.9, 0.8, 0.7, 0.6, 0.5]])  # of the first four 3 expected, 2 accepted
    assert scale.estimate == pytest.approx((16 + 200) / (16 + 300), abs=0.03)
    for _ in range(1000):
        scale.observe_([4], [5], [[0.9, 0.8, 0.7, 0.6, 0.5]])
    assert scale.estimate == pytest.approx(4 / 3, rel=0.02)


def test_the_variant_leaves_room_for_waiting_prompts() -> None:
    """8 rows and 8 prompt tokens fill a graph: 8 + 0.8 * 8 in 10 ms; 8 drafts add 6.4 tokens and 11 ms."""
    policy = Nightjar(STAIRS, free, gamma_max=1)
    assert policy.select(Load(8, 1, previous_gamma=1)) == 1
    assert policy.select(Load(8, 1, previous_gamma=1, waiting_tokens=8)) == 0


def test_a_step_with_prompts_is_compared_with_the_prediction_of_its_own_graph() -> None:
    """8 rows, 8 drafts and 6 prompt tokens are 22 tokens: 21 ms were predicted, not 11."""
    policy = Nightjar(STAIRS, free, gamma_max=1)
    policy.observe(Outcome(Load(8, 1, previous_gamma=1), 1, [1] * 8, [2] * 8, 0.021, prompt_tokens=6))
    assert list(policy.graphs.corrections.values()) == pytest.approx([1, 1, 1])


def test_a_slow_minute_is_not_blamed_on_the_graph_that_ran() -> None:
    """After one step at twice the time the pace is (1 + 2) / 2 for all graphs.

    The graph that ran has the ratio 2 / 1.5 on top of it, which counts as one step.
    """
    graphs = GraphSeconds((16, 32))
    graphs.observe_(16, 2.0)
    assert graphs.corrections[32] == pytest.approx(1.5)
    assert graphs.corrections[16] == pytest.approx(1.5 * (1 + 2 / 1.5) / 2)
    for _ in range(100):
        graphs.observe_(16, 2.0)
    assert graphs.corrections[16] == pytest.approx(graphs.corrections[32], rel=0.1)


def test_a_graph_slower_than_predicted_is_corrected() -> None:
    graphs = GraphSeconds((16, 32))
    for _ in range(50):
        graphs.observe_(16, 1.0)
        graphs.observe_(32, 2.0)
    assert graphs.corrections[32] / graphs.corrections[16] == pytest.approx(2, rel=0.15)


def test_the_first_step_of_the_variant_follows_the_prior() -> None:
    assert variant().select(Load(4, 2)) == 2  # 10, 7.33 and 6.86 ms per token
    assert variant().select(Load(4, 1)) == 1
    assert variant().select(Load(4, 0)) == 0
    assert variant().select(Load(4, 9)) == 2


def test_the_exploration_budget_runs_the_arm_that_waited_longest_per_loss() -> None:
    """The arms emit 1, 1.529 and 1.824 after one step of 12 ms; gamma 2 takes 6.578 ms per token.

    Gamma 0 would lose 10 - 6.578 = 3.42 ms, gamma 1 11 - 1.529 * 6.578 = 0.94 ms. With a budget of 2.4 ms
    gamma 1 runs twice, observed or not; then 0.52 ms are left."""
    policy = variant()
    load = Load(1, 2, previous_gamma=2)
    policy.observe(Outcome(load, 2, [2], [3], 0.012))
    assert policy.exploration_s == pytest.approx(0.05 * 0.012)
    policy.exploration_s = 0.0024
    assert [policy.select(load) for _ in range(3)] == [1, 1, 2]
    assert policy.exploration_s == pytest.approx(0.0024 - 2 * 0.00094, abs=1e-5)


def test_the_variant_spreads_a_restart_over_later_steps() -> None:
    """A restart of 160 ms adds 5 ms to 12: 17 / 1.75 = 9.71 ms per token, below 10 at gamma 0.

    A restart of 200 ms gives 18.25 / 1.75 = 10.43 ms per token.
    """
    assert variant(lambda lag, batch_size: 0.160).select(Load(1, 2, previous_gamma=0)) == 2
    assert variant(lambda lag, batch_size: 0.200).select(Load(1, 2, previous_gamma=0)) == 0
    assert variant(lambda lag, batch_size: 0.200).select(Load(1, 2, previous_gamma=1)) == 2


def test_the_time_of_a_restart_does_not_count_for_the_arm() -> None:
    policy = variant(lambda lag, batch_size: 0.1)
    policy.observe(Outcome(Load(1, 2, previous_gamma=0), 2, [2], [2], 0.112, catch_up_seconds=0.1))
    assert policy.seconds.corrections(1)[2] == pytest.approx(1)


def test_a_step_with_a_single_arm_adds_nothing_to_the_exploration_budget() -> None:
    policy = variant()
    policy.observe(Outcome(Load(64, 0), 0, [0] * 64, [1] * 64, 0.01))
    assert policy.exploration_s == 0


def test_the_state_of_the_variant_contains_its_best_arm() -> None:
    policy = variant()
    policy.observe(Outcome(Load(1, 2, previous_gamma=2), 2, [2], [3], 0.012))
    assert policy.state == {
        "steps": 1,
        "acceptance_by_position": [0.5294, 0.5571],
        "batch_sizes": {"1": {"gamma": 2, "tok_per_s": 152.03, "rounds": {"2": 1}}},
    }


def serve(
    policy: BatchPolicy, rates: list[float], *, batch_size: int = 8, gamma_max: int = 3
) -> tuple[list[int], float]:
    """Run steps of 10 + gamma ms at these acceptance rates; returns gammas and expected tokens/s."""
    random = np.random.default_rng(0)
    chosen = []
    tokens = 0.0
    seconds = 0.0
    previous = 0
    for rate in rates:
        load = Load(batch_size, gamma_max, previous)
        gamma = policy.choose(load).shapes[0].depth
        emitted = (1 + np.minimum(random.geometric(1 - rate, batch_size) - 1, gamma)).tolist()
        step_s = 0.010 + 0.001 * gamma
        policy.observe(Outcome(load, gamma, [gamma] * batch_size, emitted, step_s))
        tokens = tokens + batch_size * (1 - rate ** (gamma + 1)) / (1 - rate)
        seconds = seconds + step_s
        chosen = [*chosen, gamma]
        previous = gamma
    return chosen, tokens / seconds


LOW_THEN_HIGH = [0.02] * 400 + [0.9] * 1600
PARTS = PolicyParts(3, 8, PRIOR, free, seed=1)


def test_dsd_stays_off_for_ever_after_a_passage_of_low_acceptance() -> None:
    chosen, _ = serve(gamma_policy("dsd", PARTS), LOW_THEN_HIGH)
    assert set(chosen[100:]) == {0}


@pytest.mark.parametrize("name", ["nightjar", "nightjar-printed"])
def test_both_nightjars_escape_dsd_s_deadlock(name: str) -> None:
    chosen, _ = serve(gamma_policy(name, PARTS), LOW_THEN_HIGH)
    assert np.mean(np.array(chosen[200:400]) == 0) > 0.5
    assert np.mean(np.array(chosen[-800:]) > 0) > 0.7


def test_the_variant_speculates_again_within_two_hundred_steps() -> None:
    chosen, _ = serve(variant(gamma_max=3), LOW_THEN_HIGH)
    assert np.mean(np.array(chosen[600:]) == 3) > 0.9


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.9])
def test_the_variant_stays_within_two_percent_of_the_best_fixed_gamma(rate: float) -> None:
    rates = [rate] * 2000
    best = max(
        serve(gamma_policy(name, PARTS), rates)[1] for name in ("off", "fixed-1", "fixed-2", "fixed-3")
    )
    assert serve(variant(gamma_max=3), rates)[1] >= 0.98 * best
