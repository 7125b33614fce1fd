"""The policy of trees over rows: one rule from a single request to a full batch.

With one row it is the policy of `ygg generate`: the best shape of Eq. 3, grown until a step does not pay.
With many rows they share a growth step's forward and compete for verified nodes; where nodes cost more than
they emit, decoding is plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from yggdrasil.policy.acceptance import Acceptance
from yggdrasil.policy.competing import Expected, best_chains
from yggdrasil.policy.gamma.budget import PROMPT_TOKENS, PROMPT_VALUE, prompt_budget
from yggdrasil.policy.gamma.nightjar import MIN_LOSS, STAY_STEPS, WAITING_STEP
from yggdrasil.policy.gamma.prior import SwitchingCost
from yggdrasil.policy.gamma.protocol import Load, Outcome
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.measured import MeasuredLatency
from yggdrasil.policy.shape import BestShape, StoppingShape, context_key, grafted
from yggdrasil.state import PLAIN, Shape, StepMs
from yggdrasil.step.choice import VERIFY_ALL, Choice, VerifyMenu

__all__ = ["TreeParts", "Trees"]

PRIOR_TOKENS = 16.0  # the calibration counts as this many accepted tokens
TOKENS_MEMORY = 300.0  # after this many expected tokens the weight of old ones fades
EXPLORATION = 0.02  # as in nightjar.py, where more arms have to be tried
# Also of a long session: a stopped one tries speculation again, the later the more it would lose.
MIN_EXPLORATION = 0.0025
STEP_WEIGHT = 0.0625  # of a new step in the goodput of trees
LONG_AGO = 64  # steps without trees after which what is known of it counts no more than a new step
MOST_JUMP = 2.0  # a single step lowers the known goodput by no more, it may have been interrupted
SAME = 0.02  # an acceptance within this share of the one in use changes nothing
REVIEW_STEPS = 16  # between two uses of new corrections: arms and menus then have to be computed again
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


class _Draft(NamedTuple):
    """What a row drafts, and what the calibration expects of it in a batch of such rows.

    Args:
        shape: Before the limits of its request and of the pages.
        longest_path: Most nodes of a path of its tree, the root not counted.
    """

    shape: Shape
    expected: Expected
    longest_path: int


class TreeGoodput:
    """Realised over predicted goodput of steps with trees, at one number of rows.

    It holds what the prediction does not know: growth that stops early, and whatever the graphs' times and
    the acceptance do not explain. The prediction has the corrections of times that are not in use yet, or
    the first slow step of a graph would count twice. If trees did not run for long, a new step counts as
    much as all before. The first step replaces what was expected; if it was slower it counts half, for it
    may have been interrupted.

    Args:
        estimate: What to expect before the first step.
    """

    def __init__(self, estimate: float = 1.0) -> None:
        self.estimate = estimate
        self._observed = 0
        self._since = 0  # steps without trees

    def count_(self) -> None:
        """Count a step whose ratio is not known."""
        self._since += 1

    def observe_(self, ratio: float) -> None:
        """Add the ratio of one step."""
        self._observed += 1
        num_known = self._observed + (ratio < self.estimate)
        weight = max(1 / num_known, 0.5 if self._since > LONG_AGO else STEP_WEIGHT)
        self._since = 0
        self.estimate += weight * (max(ratio, self.estimate / MOST_JUMP) - self.estimate)


class Trees:
    """Chooses a tree for every row, how many nodes of all trees are verified, or plain decoding.

    The arms are plain decoding and the trees of Eq. 3 at this number of rows. Their goodput is predicted by
    the calibration and the profile, with what rows gain that compete for verified nodes; what steps take
    and accept corrects both, so a wrong profile is found out. As in `Nightjar`, each step adds a share of
    its time to an exploration budget, which pays for steps of the other arm: so plain decoding is measured
    in this server, too.

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
        self.measured = MeasuredLatency(parts.latency)
        self.goodput: dict[int, TreeGoodput] = {}  # by number of rows, see _rows_key
        self._predicted_rate = math.inf  # of the trees chosen last, in tokens per millisecond
        self._parts = parts
        self._expected = self._accepted = PRIOR_TOKENS
        self._calibrated: dict[int, BestShape] = {}
        self._corrected: dict[int, BestShape] = {}
        self._latency = parts.latency
        self._scale = 1.0
        self._next_review = 0  # the number of a step
        self._menus: dict[tuple[Any, ...], VerifyMenu] = {}
        self._trees: dict[tuple[int, int, int, int, bool], _Draft] = {}
        self._chains: dict[tuple[int, int, int, int], _Draft] = {}

    def choose(self, load: Load) -> Choice:
        if load.nodes_max:
            drafts, expected = self._best(load)
            if self._speculates(load, expected):
                longest_path = min(each.longest_path for each in drafts)
                shapes = tuple(
                    _limited(each.shape, limit, load.nodes_max, longest_path)
                    for each, limit in zip(drafts, load.row_limits, strict=True)
                )
                gamma = max(each.shape.depth for each in drafts)
                return Choice(shapes, load.calibrations, self._menu(load, shapes), gamma)
        return Choice((PLAIN,) * load.batch_size, load.calibrations, VERIFY_ALL)

    def _best(self, load: Load) -> tuple[list[_Draft], Expected]:
        """What every row drafts, and the step of all rows with the prompts that run along.

        Rows have trees if a tree is the best arm of any of them. Else they compete with chains.
        """
        trees = self._trees_of(load)
        step = _of_batch(trees, load)
        chains = self._chains_of(load) if load.batch_size > 1 else []
        if chains:
            competing = _of_batch(chains, load)
            if competing.rate(load.batch_size) > step.rate(load.batch_size):
                # trees compete, too; what they gain by this is not calibrated
                return trees if self._has_wide_arms(load) else chains, competing
        return trees, step

    def _has_wide_arms(self, load: Load) -> bool:
        """Whether Eq. 3 prefers trees, not chains or plain decoding, for any row."""
        at = context_key(load.rows), load.batch_size
        arms = [policy.arms(*at) for policy in self._policies(load).values()]
        return any(each.shapes[each.calibrated_best].width > 1 for each in arms)

    def _trees_of(self, load: Load) -> list[_Draft]:
        """The tree of every row; the best ones to explore if all of them are hopeless."""
        at = context_key(load.rows), load.batch_size
        policies = self._policies(load)
        is_hopeless = not any(policy.arms(*at).calibrated_best for policy in policies.values())
        trees = {key: self._tree(policy, load, is_hopeless) for key, policy in policies.items()}
        return [trees[row.state.sampling.temperature] for row in load.rows]

    def _chains_of(self, load: Load) -> list[_Draft]:
        """The chain of every row; none if a row's pair was calibrated without chains."""
        chains = {key: self._chain(policy, load) for key, policy in self._policies(load).items()}
        of_rows = [chains[row.state.sampling.temperature] for row in load.rows]
        return [each for each in of_rows if each] if all(chains.values()) else []

    def _policies(self, load: Load) -> dict[float, BestShape]:
        """The policies of shapes at the temperatures of the rows."""
        temperatures = {row.state.sampling.temperature for row in load.rows}
        return {temperature: self._policy(temperature) for temperature in temperatures}

    def _tree(self, policy: BestShape, load: Load, is_hopeless: bool) -> _Draft:
        """The tree of a row, expected to verify equally many nodes in every row."""
        key = (id(policy), *_key(load), is_hopeless)
        if key not in self._trees:
            arms = policy.arms(context_key(load.rows), load.batch_size)
            best = arms.best_tree if is_hopeless else arms.calibrated_best
            shape = arms.shapes[best] if is_hopeless else policy.shape_of(load.rows)
            alone = Expected(float(arms.gain_M[best]), float(arms.cost_M[best]))
            expected = self._with_prompts(alone, load.batch_size * int(arms.verify_M[best]), load)
            self._trees[key] = self._draft(policy, shape, expected)
        return self._trees[key]

    def _chain(self, policy: BestShape, load: Load) -> _Draft | None:
        """The chain of a row among rows that compete, by the corrected times and acceptance."""
        key = context_len, num_rows, waiting = _key(load)
        known = self._chains.get((id(policy), *key))
        if known is None:
            chains = best_chains(
                policy.acceptance,
                policy.latency,
                num_rows=num_rows,
                context_len=context_len,
                waiting=waiting,
                scale=policy.scale,
            )
            if chains is None:
                return None
            of_row = chains.expected._replace(accepted=chains.expected.accepted / num_rows)
            shape = chains.shape if self._parts.stops else replace(chains.shape, stop=None)
            known = self._chains[id(policy), *key] = self._draft(policy, shape, of_row)
        return known

    def _draft(self, policy: BestShape, shape: Shape, expected: Expected) -> _Draft:
        return _Draft(grafted(shape, self._parts.graft), expected, policy.acceptance.max_depth)

    def _policy(self, temperature: float) -> BestShape:
        """The policy of shapes at a temperature."""
        acceptance = self._parts.acceptance(temperature)
        known = self._corrected.get(id(acceptance))
        if known is None:
            calibrated = self._calibrated.get(id(acceptance))
            if calibrated is None:
                calibrated = self._calibrated[id(acceptance)] = self._uncorrected(acceptance)
            known = self._corrected[id(acceptance)] = calibrated.corrected(self._latency, self._scale)
        return known

    def _uncorrected(self, acceptance: Acceptance) -> BestShape:
        parts = self._parts
        form = StoppingShape if parts.stops else BestShape
        return form(
            shape=PLAIN,
            acceptance=acceptance,
            latency=parts.latency,
            verify_widths=parts.verify_widths,
            widths=parts.widths,
        )

    def _speculates(self, load: Load, trees: Expected) -> bool:
        """Whether trees emit more per second than plain decoding by prediction; to explore, the reverse."""
        num_rows = load.batch_size
        restart_ms = 0.0
        if load.previous_gamma == 0 and load.max_lag > 1:
            restart_ms = 1e3 * self.switching_cost(load.max_lag, num_rows)
        self._predicted_rate = trees.rate(num_rows)
        tree_ms = trees.ms / self._goodput(num_rows).estimate + restart_ms / STAY_STEPS
        plain = self._with_prompts(Expected(0.0, self.plain_ms(load)), num_rows, load)
        plain_ms = plain.ms
        tree_rate = self._predicted_rate * trees.ms / tree_ms
        plain_rate = plain.rate(num_rows)
        is_better = tree_rate > plain_rate
        # the time that a step of the other arm would lose
        loss_ms = (
            plain_ms * (1 - plain_rate / tree_rate) if is_better else tree_ms * (1 - tree_rate / plain_rate)
        )
        loss_ms = max(loss_ms, MIN_LOSS * plain_ms) + (0.0 if is_better else restart_ms)
        # next to a prompt, a step's goodput teaches nothing
        if load.waiting_tokens or 1e-3 * loss_ms > self.exploration_s:
            return is_better
        self.exploration_s -= 1e-3 * loss_ms
        return not is_better

    def _with_prompts(self, step: Expected, num_tokens: int, load: Load) -> Expected:
        """A step of this many tokens with the prompts that wait."""
        if not load.waiting_tokens:
            return step
        verify = self._latency.verify
        prompt_tokens = prompt_budget(verify.sizes, num_tokens, load.waiting_tokens)
        alone_ms, whole_ms = verify.at_each(
            (num_tokens, num_tokens + prompt_tokens), context_key(load.rows)
        )
        return Expected(step.accepted, step.ms + whole_ms - alone_ms, prompt_tokens)

    def _goodput(self, num_rows: int) -> TreeGoodput:
        """That of this number of rows; a new one expects what is known of the next smaller number."""
        key = _rows_key(num_rows)
        if key not in self.goodput:
            smaller = [known for known in self.goodput if known < key]
            self.goodput[key] = TreeGoodput(self.goodput[max(smaller)].estimate if smaller else 1.0)
        return self.goodput[key]

    def plain_ms(self, load: Load) -> float:
        policy = self._policy(load.rows[0].state.sampling.temperature)
        arms = policy.arms(context_key(load.rows), load.batch_size)
        return float(arms.cost_M[0])

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
        latency = self._latency
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
        return VerifyMenu(
            tuple(nodes),
            tuple(before_ms + ms for ms in verify_ms),
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
        ms = _parts(outcome)
        slower = self.measured.observe_(shapes, num_tokens, context_key(outcome.load.rows), ms)
        drafting = [result for result in results if result.shape.depth and not result.error]
        self.plain_steps += not drafting
        expected = sum(result.predicted_emitted - 1 for result in drafting)
        goodput = self._goodput(len(results))
        if drafting and slower is not None and not outcome.prompt_tokens:
            realised = (len(results) + self._scale * expected) / sum(ms)
            goodput.observe_(slower * realised / self._predicted_rate)
        else:
            goodput.count_()
        self._expected += expected
        self._accepted += sum(len(result.tokens) - 1 for result in drafting)
        if self._expected > TOKENS_MEMORY:
            self._accepted *= TOKENS_MEMORY / self._expected
            self._expected = TOKENS_MEMORY
        self._use_corrections_()

    def _use_corrections_(self) -> None:
        """Use what was learnt, where it differs from what is in use: often at first, then now and then."""
        if self.steps < self._next_review:
            return
        self._next_review = self.steps + min(1 + self.steps // 8, REVIEW_STEPS)
        scale = self._accepted / self._expected
        latency = self.measured.use_()
        if latency is self._latency and abs(scale - self._scale) <= SAME * self._scale:
            return
        self._scale = scale
        self._latency = latency
        self._corrected.clear()
        self._menus.clear()
        self._trees.clear()
        self._chains.clear()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "accepted_per_expected_token": round(self._scale, 3),
            "realised_over_predicted_goodput": {
                str(rows): round(goodput.estimate, 3) for rows, goodput in sorted(self.goodput.items())
            },
            **self.measured.state,
        }


def _of_batch(drafts: Sequence[_Draft], load: Load) -> Expected:
    """Accepted tokens of all rows that may draft, and the step of the slowest row."""
    expected = [draft.expected for draft in drafts]
    accepted = sum(each.accepted for each, limit in zip(expected, load.row_limits, strict=True) if limit)
    slowest = max(expected, key=lambda each: each.ms)
    return slowest._replace(accepted=accepted)


def _parts(outcome: Outcome) -> StepMs:
    """What the step took, with the time between two steps."""
    parts = outcome.results[0].parts if outcome.results else None
    head_s = parts.head / 1e3 if parts else 0.0
    rest_s = outcome.seconds - outcome.catch_up_seconds - outcome.draft_seconds - outcome.verify_seconds
    return StepMs(
        *(1e3 * s for s in (head_s, outcome.draft_seconds - head_s, outcome.verify_seconds, rest_s))
    )


def _key(load: Load) -> tuple[int, int, int]:
    """What the expectations depend on: the context, the number of rows, and the prompt tokens that wait."""
    waiting = -(-load.waiting_tokens // WAITING_STEP) * WAITING_STEP
    return context_key(load.rows), load.batch_size, waiting


def _rows_key(num_rows: int) -> int:
    """The number of rows, rounded up to a power of two: estimates of loads are kept apart."""
    return 1 << (num_rows - 1).bit_length()


def _limited(shape: Shape, depth_limit: int, nodes_max: int, longest_path: int) -> Shape:
    """The shape, as far as the request and the pages allow it; nodes of a graft go before growth steps."""
    if shape.depth <= depth_limit and shape.most_nodes(longest_path) - 1 <= nodes_max:
        return shape
    depth = min(shape.depth, depth_limit, nodes_max // shape.width)
    if depth <= 0:
        return PLAIN
    graft = min(shape.graft, depth_limit, nodes_max - shape.width * depth)
    return replace(shape, depth=depth, graft=graft)
