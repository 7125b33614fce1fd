"""The policy of trees over rows: one rule from a single request to a full batch.

With one row it is the policy of `ygg generate`: the best shape of Eq. 3, grown until a step does not pay.
With many rows they share a growth step's forward and compete for verified nodes; where nodes cost more than
they emit, decoding is plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.gamma.budget import PROMPT_TOKENS, prompt_budget
from yggdrasil.policy.gamma.estimates import GraphSeconds
from yggdrasil.policy.gamma.nightjar import MIN_LOSS, PROMPT_VALUE, STAY_STEPS
from yggdrasil.policy.gamma.prior import SwitchingCost
from yggdrasil.policy.gamma.protocol import Load, Outcome
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import BestShape, StoppingShape, context_key, grafted
from yggdrasil.state import PLAIN, Shape
from yggdrasil.step.choice import VERIFY_ALL, Choice, VerifyMenu

__all__ = ["TreeParts", "Trees"]

PRIOR_TOKENS = 16.0  # the calibration counts as this many accepted tokens
TOKENS_MEMORY = 300.0  # after this many expected tokens the weight of old ones fades
EXPLORATION = 0.02  # as in nightjar.py, where more arms have to be tried
# Also of a long session: a stopped one tries speculation again, the later the more it would lose.
MIN_EXPLORATION = 0.0025
ARM_WEIGHT = 0.125  # of a new step in an arm's slowness
LONG_AGO = 64  # steps after which what is known of an arm's slowness counts no more than a new step
MOST_JUMP = 2.0  # times the known slowness: a single step counts for no more, it may have been interrupted
SAME = 0.02  # corrections within this share of the ones in use change no menu
MENUS_KEPT = 512


@dataclass(frozen=True)
class TreeParts:
    """What is known of a pair.

    Args:
        verify_widths: Most nodes of a single row's tree are the last one of these.
        stops: Whether growth may stop early: on a device the host would wait for every step.
        graft: Most nodes that repeat a row's text, see `Shape.graft`.
    """

    acceptance: Callable[[float], Acceptance]
    latency: LatencyModel
    widths: tuple[int, ...]
    verify_widths: tuple[int, ...]
    stops: bool
    graft: int = 0


class ArmSlowness:
    """Measured over predicted milliseconds of the steps of one arm.

    If the machine changes its pace, the arm that runs notices first and looks worse or better than the
    other. Then one step of the other arm brings both to the new pace.
    """

    def __init__(self) -> None:
        self.estimate = 1.0
        self._steps = 0
        self._last = 0

    def observe_(self, ratio: float, step: int) -> None:
        """Add the ratio of one step, given the number of the step."""
        self._steps += 1
        is_old = step - self._last > LONG_AGO
        weight = max(1 / self._steps, 0.5 if is_old else ARM_WEIGHT)
        self._last = step
        self.estimate += weight * (min(ratio, MOST_JUMP * self.estimate) - self.estimate)


class Trees:
    """Chooses a tree for every row, how many nodes of all trees are verified, or plain decoding.

    The arms are plain decoding and the trees of Eq. 3 at this number of rows. Their goodput is predicted by
    the calibration and the profile; what steps take and accept corrects both, so a wrong profile is found
    out. As in `Nightjar`, each step adds a share of its time to an exploration budget, which pays for steps
    of the other arm: so plain decoding is measured in this server, too.

    Args:
        parts: What is known of the pair.

    Source: Yggdrasil Eq. (3) and section 4.2 over the batches of Nightjar section 4; trees in batches are
    the open problem of Yggdrasil section 9.
    """

    def __init__(self, parts: TreeParts, switching_cost: SwitchingCost) -> None:
        self.switching_cost = switching_cost
        self.exploration_s = 0.0
        self.steps = 0
        self.plain_steps = 0
        self.graphs = GraphSeconds(parts.latency.verify.sizes)
        self.slowness = {True: ArmSlowness(), False: ArmSlowness()}  # with trees, without
        self._parts = parts
        self._expected = self._accepted = PRIOR_TOKENS
        self._by_acceptance: dict[int, BestShape] = {}
        self._slowness = dict(self.graphs.corrections)  # in use, see SAME
        self._scale = 1.0
        self._menus: dict[tuple[Any, ...], VerifyMenu] = {}

    def choose(self, load: Load) -> Choice:
        if load.nodes_max:
            policies = [self._policy(row.state.sampling.temperature) for row in load.rows]
            if self._speculates(load, policies):
                whole = [policy.shape_of(load.rows) for policy in policies]
                longest_path = min(policy.acceptance.max_depth for policy in policies)
                shapes = tuple(
                    _limited(grafted(shape, self._parts.graft), limit, load.nodes_max, longest_path)
                    for shape, limit in zip(whole, load.row_limits, strict=True)
                )
                gamma = max(shape.depth for shape in whole)
                return Choice(shapes, load.calibrations, self._menu(load, shapes), gamma)
        return Choice((PLAIN,) * load.batch_size, load.calibrations, VERIFY_ALL)

    def _policy(self, temperature: float) -> BestShape:
        """The policy of shapes at a temperature."""
        acceptance = self._parts.acceptance(temperature)
        known = self._by_acceptance.get(id(acceptance))
        if known is None:
            parts = self._parts
            form = StoppingShape if parts.stops else BestShape
            known = self._by_acceptance[id(acceptance)] = form(
                shape=PLAIN,
                acceptance=acceptance,
                latency=parts.latency,
                verify_widths=parts.verify_widths,
                widths=parts.widths,
            )
        return known

    def _speculates(self, load: Load, policies: Sequence[BestShape]) -> bool:
        """Whether trees emit more per second than plain decoding by prediction; to explore, the reverse."""
        context = context_key(load.rows)
        num_rows = load.batch_size
        arms = [policy.arms(context, num_rows) for policy in policies]
        best = [each.calibrated_best for each in arms]
        if not any(best):
            return False
        gain = sum(
            float(each.gain_M[index])
            for each, index, limit in zip(arms, best, load.row_limits, strict=True)
            if limit
        )
        tree_ms = max(float(each.cost_M[index]) for each, index in zip(arms, best, strict=True))
        restart_ms = 0.0
        if load.previous_gamma == 0 and load.max_lag > 1:
            restart_ms = 1e3 * self.switching_cost(load.max_lag, num_rows)
        tree_ms = tree_ms * self.slowness[True].estimate + restart_ms / STAY_STEPS
        plain_ms = self.plain_ms(load)
        tree_rate = (num_rows + self._scale * gain) / tree_ms
        plain_rate = num_rows / plain_ms
        is_better = tree_rate > plain_rate
        # the time that a step of the other arm would lose
        loss_ms = (
            plain_ms * (1 - plain_rate / tree_rate) if is_better else tree_ms * (1 - tree_rate / plain_rate)
        )
        loss_ms = max(loss_ms, MIN_LOSS * plain_ms) + (0.0 if is_better else restart_ms)
        if 1e-3 * loss_ms > self.exploration_s:
            return is_better
        self.exploration_s -= 1e-3 * loss_ms
        return not is_better

    def plain_ms(self, load: Load) -> float:
        policy = self._policy(load.rows[0].state.sampling.temperature)
        arms = policy.arms(context_key(load.rows), load.batch_size)
        return float(arms.cost_M[0]) * self.slowness[False].estimate

    def _size(self, num_tokens: int) -> int:
        """The graph of the target that runs this many tokens."""
        sizes = self._parts.latency.verify.sizes
        return next((size for size in sizes if size >= num_tokens), sizes[-1])

    def _menu(self, load: Load, shapes: Sequence[Shape]) -> VerifyMenu:
        """The numbers of nodes that fill a graph, with the step's time and the prompts that run along."""
        width = sum(shape.width for shape in shapes if shape.depth)
        num_drafting = sum(shape.depth > 0 for shape in shapes)
        waiting = load.waiting_tokens
        key = (width, num_drafting, load.batch_size, waiting, load.drafts_max, context_key(load.rows))
        menu = self._menus.get(key)
        if menu is None:
            if len(self._menus) >= MENUS_KEPT:
                self._menus.clear()
            menu = self._menus[key] = self._new_menu(*key)
        return menu

    def _new_menu(
        self,
        width: int,
        num_drafting: int,
        num_rows: int,
        waiting: int,
        drafts_max: int | None,
        context_len: int,
    ) -> VerifyMenu:
        latency = self._parts.latency
        sizes = latency.verify.sizes
        reserved = num_rows + min(waiting, PROMPT_TOKENS)
        most = sizes[-1] - num_rows if drafts_max is None else drafts_max
        most = max(0, min(most, num_rows * (self._parts.verify_widths[-1] - 1)))
        nodes = sorted({*(size - reserved for size in sizes if 0 < size - reserved < most), most})
        prompts = [prompt_budget(sizes, num_rows + count, waiting) if waiting else 0 for count in nodes]
        growth_ms = latency.draft.graphs_ms(width, context_len)
        before_ms = (
            latency.draft.graphs_ms(2 * num_drafting, context_len) - growth_ms + latency.step_host_ms
        )
        totals = [num_rows + count + more for count, more in zip(nodes, prompts, strict=True)]
        verify_ms = latency.verify.at_each(totals, context_len)
        slower = [self._slowness[self._size(total)] for total in totals]
        return VerifyMenu(
            tuple(nodes),
            tuple(factor * (before_ms + ms) for factor, ms in zip(slower, verify_ms, strict=True)),
            growth_ms=growth_ms + latency.growth_host_ms,
            # above 1 it would make some nodes more than certain
            scale=min(1.0, self._scale),
            extra=tuple(PROMPT_VALUE * count for count in prompts),
        )

    def observe(self, outcome: Outcome) -> None:
        self.steps += 1
        results = outcome.results
        shapes = [result.shape for result in results]
        if outcome.load.nodes_max:
            share = max(EXPLORATION / math.sqrt(self.steps), MIN_EXPLORATION)
            self.exploration_s += share * outcome.seconds
        num_tokens = sum(result.verified for result in results) + outcome.prompt_tokens
        predicted_ms = self._predicted_ms(shapes, num_tokens, context_key(outcome.load.rows))
        taken_ms = 1e3 * (outcome.seconds - outcome.catch_up_seconds)
        self.graphs.observe_(self._size(num_tokens), taken_ms / predicted_ms)
        drafting = [result for result in results if result.shape.depth and not result.error]
        self.slowness[bool(drafting)].observe_(taken_ms / predicted_ms, self.steps)
        self.plain_steps += not drafting
        self._expected += sum(result.predicted_emitted - 1 for result in drafting)
        self._accepted += sum(len(result.tokens) - 1 for result in drafting)
        if self._expected > TOKENS_MEMORY:
            self._accepted *= TOKENS_MEMORY / self._expected
            self._expected = TOKENS_MEMORY
        self._use_corrections_()

    def _predicted_ms(self, shapes: Sequence[Shape], num_tokens: int, context_len: int) -> float:
        """The profile's milliseconds of a step that ran these shapes."""
        latency = self._parts.latency
        drafting = [shape for shape in shapes if shape.depth]
        if not drafting:
            return latency.undrafted_ms(num_tokens, context_len)
        depth = max(shape.depth for shape in drafting)
        growth_ms = latency.draft.graphs_ms(sum(shape.width for shape in drafting), context_len)
        head_ms = latency.draft.graphs_ms(2 * len(drafting), context_len)
        growing_ms = (depth - 1) * growth_ms + depth * latency.growth_host_ms
        verify_ms = latency.verify.at(num_tokens, context_len)
        return head_ms + growing_ms + latency.step_host_ms + verify_ms

    def _use_corrections_(self) -> None:
        """Use what was learnt, where it differs from what is in use."""
        scale = self._accepted / self._expected
        found = self.graphs.corrections
        changed = abs(scale - self._scale) > SAME * self._scale or any(
            abs(found[size] - used) > SAME * used for size, used in self._slowness.items()
        )
        if changed:
            self._scale = scale
            self._slowness = dict(found)
            self._menus.clear()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "accepted_per_expected_token": round(self._scale, 3),
            "slowness": {
                "trees": round(self.slowness[True].estimate, 3),
                "plain": round(self.slowness[False].estimate, 3),
            },
            "slowness_by_graph": {str(size): round(ratio, 3) for size, ratio in self._slowness.items()},
        }


def _limited(shape: Shape, depth_limit: int, nodes_max: int, longest_path: int) -> Shape:
    """The shape, as far as the request and the pages allow it; nodes of a graft go before growth steps."""
    if shape.depth <= depth_limit and shape.most_nodes(longest_path) - 1 <= nodes_max:
        return shape
    depth = min(shape.depth, depth_limit, nodes_max // shape.width)
    if depth <= 0:
        return PLAIN
    graft = min(shape.graft, depth_limit, nodes_max - shape.width * depth)
    return replace(shape, depth=depth, graft=graft)
