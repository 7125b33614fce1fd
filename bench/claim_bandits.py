"""Which policy of speculative lengths has the lowest regret while it learns, and does that of Nightjar
grow as its Theorem 1 states?

Synthetic bandits, no model: a step of B rows takes gamma draft forwards and a verification that is flat up
to KNEE tokens (memory bound) and linear beyond (compute bound), with log-normal noise; every draft token is
accepted with one probability. Policies that start from a prior or from offline measurements all get the
same wrong one: a later knee, a quicker draft, another acceptance. Four settings:

- stationary: B stays a while, then jumps among 1, 4, 16 and 64;
- switching: the same, and running the draft after steps without it costs the time to catch its KV up;
- drifting: acceptance alternates between phases in which speculation pays and phases in which it does not;
- traffic: every B from 1 to 64 as the load wanders, acceptance drifts slowly, switching costs.

Arms: Nightjar's variant ("nightjar"), Algorithm 1 as printed ("nightjar-printed") and every baseline of the
paper. Regret is the expected goodput of the best arm of each step, which has no cost of switching, less
that of the chosen one. So where switching costs, nobody can reach zero: the row "best arm, paying" follows
the best arm of each step and pays. The exponent x of R(T) ~ T^x is fitted to the last nine tenths of the
curve.

This world has no graphs, so the variant corrects times by arm here; where it serves it corrects them by
graph, and leaves drafts out to fill one. `claim_wrong_profiles` measures the server's policy of trees under
profiles that err.

What flatters the variant: its model is of the same kind as this world (acceptance the same at all batch
sizes, one time per arm), and rows accept independently of each other; requests do not. The other bandits
assume nothing of the sort.

Refuted if: the variant's exponent in the stationary setting is above 0.6 (Theorem 1: 0.5 and a logarithm);
the printed algorithm's is not within 0.1 of the 0.75 that its bins predict; another policy has less regret
than the variant in some setting; a selection takes 20 microseconds or more in the median."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from bench.lib.claim import Claim, Log
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.prior import GoodputPrior
from yggdrasil.policy.gamma.protocol import ChainPolicy, Load, Outcome
from yggdrasil.policy.gamma.registry import PolicyParts, gamma_policy

__all__ = ["SETTINGS", "Run", "World", "measure", "simulate"]

POLICIES = (
    *(
        "nightjar",
        "nightjar-printed",
        "ada-bingreedy",
        "banditspec",
        "linucb",
        "lints",
        "dsd",
        "tiers",
        "tetris",
    ),
    *("off", "fixed-1", "fixed-3", "fixed-5"),
)
ORACLE = "best arm, paying"
GAMMA_MAX = 7
MAX_BATCH = 64
MENU_TOKENS = 256
MENU = (1, 2, 8, 12, 16, 32, 64, 128, MENU_TOKENS)
FLAT_S = 0.020
KNEE = 64
PER_TOKEN_S = 0.0002
DRAFT_S = 0.0015
DRAFT_PER_ROW_S = 0.00001
HOST_S = 0.0005
TIME_NOISE = 0.05
MOST_LAG = 256  # rows come and go
STEPS = 20_000
SEEDS = 5
QUICK_STEPS = 1_000
QUICK_SEEDS = 2
TAIL = 0.1  # the fit of the exponent leaves out the first tenth
PREDICTED = (0.65, 0.85)
BOUND = 0.6
MOST_SELECT_US = 20.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class World:
    """What the steps of one seed are like, the same for every policy.

    Args:
        batch_sizes: B of every step.
        acceptance: Of a draft token, step by step.
        switching: Whether catching the draft up takes time.
        seed: Of acceptance draws and noise.
    """

    batch_sizes: Sequence[int]
    acceptance: Array
    switching: bool
    seed: int

    def switching_s(self, lag: int, batch_size: int) -> float:
        """c_prefill: a forward of the draft over the tokens it has missed."""
        return min(lag, 1) * (0.005 + 0.00001 * lag * batch_size) if self.switching else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy in one world.

    Args:
        regret: Expected tokens per second lost, step by step.
        regret_share: Their sum over the sum of the best arms' goodput.
        speed: Time that the best arm of each step would have taken for the step's expected tokens, over the
            time taken: 1 at best.
    """

    regret: Array
    regret_share: float
    speed: float


@cache
def step_s(batch_size: int, gamma: int, verified: int) -> float:
    """Seconds of a step without noise."""
    verify = FLAT_S + PER_TOKEN_S * max(batch_size + verified - KNEE, 0)
    return gamma * (DRAFT_S + DRAFT_PER_ROW_S * batch_size) + verify + HOST_S


def expected_emitted(rate: float, gamma: float) -> float:
    """Tokens of a row."""
    return float((1 - rate ** (gamma + 1)) / (1 - rate))


def wrong_prior(widths: tuple[int, ...] = ()) -> GoodputPrior:
    """Half the compute-bound slope, a draft of 0.7 times the time, acceptance 0.6; graphs of these widths,
    of which the world has none.
    """

    return GoodputPrior(
        drafting=lambda batch_size, gamma: 0.7 * gamma * (DRAFT_S + DRAFT_PER_ROW_S * batch_size),
        verifying=lambda tokens: FLAT_S + 0.5 * PER_TOKEN_S * max(tokens - KNEE, 0) + HOST_S,
        emitted=partial(expected_emitted, 0.6),
        widths=widths,
    )


def most_gamma(batch_size: int) -> int:
    """The menu's limit."""
    return min(GAMMA_MAX, MENU_TOKENS // batch_size - 1)


@cache
def best_gamma(batch_size: int, rate: float) -> int:
    """The arm with the largest expected goodput."""
    return max(
        range(most_gamma(batch_size) + 1),
        key=lambda gamma: expected_emitted(rate, gamma) / step_s(batch_size, gamma, batch_size * gamma),
    )


@cache
def best_tok_per_s(batch_size: int, rate: float) -> float:
    """That arm's expected goodput."""
    gamma = best_gamma(batch_size, rate)
    return batch_size * expected_emitted(rate, gamma) / step_s(batch_size, gamma, batch_size * gamma)


class Oracle(FixedGamma):
    """Runs the best arm of every step; it alone sees the world."""

    def __init__(self, world: World) -> None:
        super().__init__(0)
        self._arms = iter(
            [
                best_gamma(batch_size, float(rate))
                for batch_size, rate in zip(world.batch_sizes, world.acceptance, strict=True)
            ]
        )

    def select(self, load: Load) -> int:
        return next(self._arms)


def simulate(policy: ChainPolicy, world: World) -> Run:
    """Every step of a world."""
    random = np.random.default_rng(world.seed)
    noise = np.exp(TIME_NOISE * random.standard_normal(len(world.batch_sizes)))
    draws = (random.geometric(1 - np.repeat(world.acceptance, world.batch_sizes)) - 1).tolist()
    regret = np.zeros(len(noise))
    best_goodput = 0.0
    best_s = 0.0
    taken_s = 0.0
    first = previous = lag = 0
    for step, (batch_size, rate) in enumerate(
        zip(world.batch_sizes, world.acceptance.tolist(), strict=True)
    ):
        load = Load(batch_size, most_gamma(batch_size), previous, lag)
        gamma = policy.select(load)
        # of all rows the same: nobody has anything to pick
        values = np.repeat(rate ** np.arange(1, gamma + 1), batch_size)
        menu = policy.menu(load, gamma, len(values))
        verified = menu.best([0.0, *values.cumsum()], num_rows=batch_size, depth=gamma)
        # the likeliest draft tokens are the first ones of every row
        even, more = divmod(verified, batch_size)
        restart = world.switching_s(lag, batch_size) if gamma and not previous else 0.0
        seconds = step_s(batch_size, gamma, verified) + restart
        tokens = more * expected_emitted(rate, even + 1) + (batch_size - more) * expected_emitted(
            rate, even
        )
        best = best_tok_per_s(batch_size, rate)
        regret[step] = best - tokens / seconds
        best_goodput = best_goodput + best
        best_s = best_s + tokens / best
        taken_s = taken_s + seconds
        drafted = [even + 1] * more + [even] * (batch_size - more)
        emitted = [1 + min(pair) for pair in zip(draws[first : first + batch_size], drafted, strict=True)]
        policy.observe(
            Outcome(
                load, gamma, drafted, emitted, seconds * float(noise[step]), restart * float(noise[step])
            )
        )
        first = first + batch_size
        previous = gamma
        lag = 0 if gamma else min(lag + 1, MOST_LAG)
    return Run(regret=regret, regret_share=float(regret.sum()) / best_goodput, speed=best_s / taken_s)


def jumping_sizes(random: np.random.Generator, num_steps: int) -> list[int]:
    """Sizes that stay for 50 steps in the mean."""
    jumps = random.random(num_steps) < 1 / 50
    return [
        int(size)
        for size in random.choice([1, 4, 16, 64], num_steps)[
            np.maximum.accumulate(np.where(jumps, np.arange(num_steps), 0))
        ]
    ]


def wandering_sizes(random: np.random.Generator, num_steps: int) -> list[int]:
    """A load that wanders between 1 and MAX_BATCH, evenly in its logarithm, reflected at both ends."""
    walk = np.abs(
        (6.0 * random.random() + np.cumsum(0.04 * random.standard_normal(num_steps)) + 6.0) % 12.0 - 6.0
    )
    return [min(int(size), MAX_BATCH) for size in np.rint(2.0**walk)]


def world_of(setting: str, seed: int, num_steps: int) -> World:
    """One of SETTINGS."""
    random = np.random.default_rng([seed, 1])
    times = np.arange(num_steps)
    sizes = wandering_sizes(random, num_steps) if setting == "traffic" else jumping_sizes(random, num_steps)
    acceptance = np.full(num_steps, 0.7)
    if setting == "drifting":
        acceptance = np.where(times // (num_steps // 8) % 2 == 0, 0.8, 0.05)
    if setting == "traffic":
        acceptance = np.round(0.5 + 0.3 * np.sin(2 * np.pi * times / (num_steps // 3)), 2)
    return World(
        batch_sizes=sizes, acceptance=acceptance, switching=setting in ("switching", "traffic"), seed=seed
    )


SETTINGS = ("stationary", "switching", "drifting", "traffic")


def policy_in(name: str, world: World, widths: tuple[int, ...] = ()) -> ChainPolicy:
    """A new policy that has seen nothing of this world, but knows graphs of these widths."""
    if name == ORACLE:
        return Oracle(world)
    return gamma_policy(
        name, PolicyParts(GAMMA_MAX, MAX_BATCH, wrong_prior(widths), world.switching_s, seed=world.seed)
    )


def exponent(regret: Array) -> float:
    """x of R(T) ~ T^x by least squares on a log-log grid over the tail."""
    total = np.cumsum(regret)
    times = np.unique(np.geomspace(TAIL * len(total), len(total) - 1, 60).astype(int))
    return float(np.polyfit(np.log(times), np.log(np.maximum(total[times], 1e-9)), 1)[0])


def measure_setting(setting: str, num_steps: int, num_seeds: int, log: Log) -> dict[str, Any]:
    """Every policy in the same worlds."""
    worlds = [world_of(setting, seed, num_steps) for seed in range(num_seeds)]
    runs = {}
    for name in (ORACLE, *POLICIES):
        runs[name] = [simulate(policy_in(name, world), world) for world in worlds]
        log(f"{setting}: {name}")
    grid = np.unique(np.geomspace(10, num_steps, 80).astype(int)) - 1
    policies = {name: _summary(runs[name], grid) for name in runs}
    losses = {name: found["regret_share"]["median"] for name, found in policies.items() if name != ORACLE}
    return {
        "policies": policies,
        "curve_steps": (grid + 1).tolist(),
        "lowest_regret": min(losses, key=lambda name: losses[name]),
    }


def _summary(runs: Sequence[Run], grid: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {
        "exponent": _spread([exponent(run.regret) for run in runs]),
        "regret_share": _spread([run.regret_share for run in runs]),
        "speed_over_best_arm": _spread([run.speed for run in runs]),
        "curve_tok_per_s": np.mean([np.cumsum(run.regret)[grid] for run in runs], axis=0).round(1).tolist(),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(values)), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def selection_us(name: str, num_steps: int) -> dict[str, float]:
    """Microseconds of `select` in the traffic setting with a server's graphs to choose from, the first half
    of the steps left out.
    """
    world = world_of("traffic", 0, num_steps)
    policy = policy_in(name, world, MENU)
    taken = []
    select = policy.select

    def timed(load: Load) -> int:
        begin = time.perf_counter_ns()
        gamma = select(load)
        taken.append((time.perf_counter_ns() - begin) / 1e3)
        return gamma

    policy.select = timed  # type: ignore[method-assign]
    simulate(policy, world)
    settled = taken[num_steps // 2 :]
    return {
        "median": round(float(np.median(settled)), 2),
        "p99": round(float(np.percentile(settled, 99)), 2),
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """All settings, the cost of selecting, and which parts of the claim held."""
    num_steps, num_seeds = (QUICK_STEPS, QUICK_SEEDS) if options.quick else (STEPS, SEEDS)
    settings = {setting: measure_setting(setting, num_steps, num_seeds, log) for setting in SETTINGS}
    costs = {name: selection_us(name, num_steps // 2) for name in POLICIES}
    found = {
        name: settings["stationary"]["policies"][name]["exponent"]["median"]
        for name in ("nightjar", "nightjar-printed")
    }
    held = {
        "variant_exponent_at_most_0.6": found["nightjar"] <= BOUND,
        "printed_exponent_near_0.75": PREDICTED[0] <= found["nightjar-printed"] <= PREDICTED[1],
        "variant_has_lowest_regret": {
            setting: settings[setting]["lowest_regret"] == "nightjar" for setting in SETTINGS
        },
        "selection_below_20_us": all(cost["median"] < MOST_SELECT_US for cost in costs.values()),
    }
    return {
        "run": {"steps": num_steps, "seeds": num_seeds, "rehearsal": options.quick},
        "settings": settings,
        "selection_us": costs,
        "held": held,
    }


def table(result: Mapping[str, Any]) -> str:
    """Setting by setting."""
    lines = []
    for setting, found in result["settings"].items():
        lines.append(
            f"{setting:<20} {'regret %':>9} {'(min-max)':>15} {'exponent':>9} {'(min-max)':>14} "
            f"{'speed':>8}"
        )
        for name, row in sorted(
            found["policies"].items(), key=lambda item: item[1]["regret_share"]["median"]
        ):
            share = row["regret_share"]
            x = row["exponent"]
            speed = row["speed_over_best_arm"]["median"]
            shares = f"({100 * share['min']:.2f}-{100 * share['max']:.2f})"
            xs = f"({x['min']:.2f}-{x['max']:.2f})"
            lines.append(
                f"  {name:<18} {100 * share['median']:>9.2f} {shares:>15} {x['median']:>9.2f} {xs:>14} "
                f"{speed:>8.3f}"
            )
    lines.append(
        "microseconds of a selection, median and p99: "
        + ", ".join(f"{name} {us['median']}/{us['p99']}" for name, us in result["selection_us"].items())
    )
    return "\n".join([*lines, f"held: {result['held']}"])


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Cumulative regret, mean over seeds, with slopes of 1/2 and 3/4."""
    every_axes = figure.subplots(1, len(SETTINGS))
    for axes, (setting, found) in zip(every_axes, result["settings"].items(), strict=True):
        steps = np.array(found["curve_steps"])
        for place, name in enumerate(POLICIES):
            curve = np.array(found["policies"][name]["curve_tok_per_s"])
            bold = name.startswith("nightjar")
            axes.plot(
                steps,
                curve,
                color=f"C{place % 10}",
                linewidth=2.2 if bold else 0.9,
                linestyle="-" if place < 10 else "--",
                label=name,
            )
        last = float(found["policies"]["nightjar-printed"]["curve_tok_per_s"][-1])
        for slope in (0.5, 0.75):
            axes.plot(
                steps, last * (steps / steps[-1]) ** slope, color="grey", linestyle=":", linewidth=0.8
            )
        axes.set(xscale="log", yscale="log", xlabel="steps", title=setting)
    every_axes[0].set_ylabel("cumulative regret, tokens/s (dotted: slopes 1/2, 3/4)")
    every_axes[-1].legend(fontsize=6)


CLAIM = Claim(
    name="bandits",
    doc=__doc__,
    measure=measure,
    table=table,
    draw=draw,
    size=(14, 4.5),
    devices=(),
    rehearsal=f"{QUICK_STEPS} steps",
)

if __name__ == "__main__":
    CLAIM.main()
