"""Run an iteration by a plan: the calls of `Engine.step` in another order, some of them in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.schedule.plan import Plan
from yggdrasil.schedule.side import Side, side_of
from yggdrasil.schedule.stages import needs
from yggdrasil.staging import upload
from yggdrasil.state import PLAIN, DecodeState, Head, Row, Shape, StepResult
from yggdrasil.step.accept import Accepted, follow, target_tokens
from yggdrasil.step.choice import Choice
from yggdrasil.step.commit import commit_draft_, commit_text_, roll_back_unfinished_
from yggdrasil.step.draft import Drafted, catch_up_, draft, grow, head_draft, row_of, run_nodes
from yggdrasil.step.prune import Pruned, prune
from yggdrasil.step.sampling import TargetTokens, gumbel_noise
from yggdrasil.step.verify import verify

__all__ = ["Executor", "StageClock"]


class StageClock(Protocol):
    """Times stages: a `Trace`, or a clock that also times the device."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the block as one run of stage `name`."""
        ...


@dataclass
class Iteration:
    """The data of one iteration; each field is written by one stage and read by later ones.

    Attributes:
        vocab: V, 0 until the target has run once.
        keeps_head: Whether the plan drafts the next head ahead of time.
        num_run: The first `num_run` nodes of the drafted tree have KV in the draft's cache.
        target_tokens: The target's own token after every verified node.
        next_candidates: The draft's candidates after those tokens and their log-probabilities, (K, C) each,
            if next_head ran.
        next_head: The candidates after the last accepted node.
    """

    target: TokenModel
    draft: TokenModel
    state: DecodeState
    policy: ShapePolicy
    row: Row
    vocab: int
    keeps_head: bool
    root_pos: int = field(init=False)
    choice: Choice = field(init=False)
    shape: Shape = field(init=False)
    head: Head = field(init=False)
    drafted: Drafted = field(init=False)
    num_run: int = field(init=False)
    pruned: Pruned = field(init=False)
    logits_KV: Tensor = field(init=False)
    hidden_KE: Tensor = field(init=False)
    target_tokens: TargetTokens = field(init=False)
    accepted: Accepted = field(init=False)
    caught_up: bool = False
    next_candidates: tuple[Tensor, Tensor] | None = None
    next_head: Head | None = None

    def __post_init__(self) -> None:
        self.root_pos = self.state.root_pos


def _policy(it: Iteration) -> None:
    it.choice = it.policy.choose([it.row])
    it.shape = it.choice.shapes[0]


def _head(it: Iteration) -> None:
    """Use the head drafted ahead of time if it belongs to this root, else draft one.

    The old head is dropped in either case, so an interrupted iteration leaves none.
    """
    ready = it.state.head
    it.state.head = None
    if it.shape.depth == 0:
        return
    if catch_up_(it.draft, it.state):
        it.shape = PLAIN
        it.caught_up = True
        return
    if ready is None or ready.root_pos != it.root_pos or it.draft.cache.len != it.root_pos:
        ready = head_draft(it.draft, it.state)
    it.head = ready


def _grow(it: Iteration) -> None:
    if it.shape.depth == 0:
        it.drafted = draft(it.draft, it.state, it.shape)
    else:
        spare = it.shape.num_nodes if it.keeps_head else 0
        it.drafted = grow(
            it.draft, it.state, it.shape, it.head, it.choice.calibrations[0].platt, spare=spare
        )
    it.num_run = it.drafted.num_run
    it.shape = it.drafted.shape


def _noise(it: Iteration) -> None:
    for position in range(it.root_pos + 1, it.root_pos + it.shape.depth + 2):
        gumbel_noise(it.state.sampling.seed, position, it.vocab, it.target.device)


def _tail(it: Iteration) -> None:
    tree = it.drafted.tree
    run_nodes(it.draft, tree, it.num_run, len(tree), it.root_pos)
    it.num_run = len(tree)


def _prune(it: Iteration) -> None:
    it.pruned = prune(it.drafted.tree, it.shape, it.choice)


def _verify(it: Iteration) -> None:
    it.logits_KV, it.hidden_KE = verify(it.target, it.pruned.tree, it.state.tokens)


def _target_tokens(it: Iteration) -> None:
    it.target_tokens = target_tokens(it.pruned.tree, it.logits_KV, it.root_pos, it.state.sampling)


def _next_head(it: Iteration) -> None:
    """Run the draft over the target's token after every verified node; one of them is the next root."""
    # the same arrays but another length: `walk` must not see these nodes
    tree = copy(it.drafted.tree)
    first = len(tree)
    parents_K = upload(it.pruned.drafted_node, it.target_tokens.token_K.device)
    tree.grow(parents_K, it.target_tokens.token_K, tree.log_prob_N[parents_K])
    it.next_candidates = run_nodes(it.draft, tree, first, len(tree), it.root_pos)


def _walk(it: Iteration) -> None:
    it.accepted = follow(it.pruned.tree, it.target_tokens)


def _commit_target(it: Iteration) -> None:
    it.target.cache.commit_(it.accepted.path)


def _commit_draft(it: Iteration) -> None:
    """Commit the path; if next_head ran, keep the next root's KV after it as provisional."""
    if it.next_candidates is None:
        return commit_draft_(it.draft, it.pruned, it.accepted, it.num_run)
    path = it.accepted.path
    cache = it.draft.cache
    last = path[-1]
    cache.commit_([*(it.pruned.drafted_node[node] for node in path), len(it.drafted.tree) + last])
    cache.rollback_(cache.len - 1)
    it.next_head = Head(it.root_pos + len(path), *it.next_candidates, last)
    return None


def _text(it: Iteration) -> None:
    commit_text_(it.state, it.accepted, it.hidden_KE)
    it.state.head = it.next_head


RUN: Mapping[str, Callable[[Iteration], None]] = {
    "policy": _policy,
    "head": _head,
    "grow": _grow,
    "noise": _noise,
    "tail": _tail,
    "prune": _prune,
    "verify": _verify,
    "target_tokens": _target_tokens,
    "next_head": _next_head,
    "walk": _walk,
    "commit_target": _commit_target,
    "commit_draft": _commit_draft,
    "text": _text,
}


def _noise_helps(it: Iteration) -> bool:
    return it.shape.depth > 0 and it.state.sampling.temperature > 0 and it.vocab > 0


def _tail_helps(it: Iteration) -> bool:
    return 0 < it.num_run < len(it.drafted.tree)


def _next_head_helps(it: Iteration) -> bool:
    """Whether cache and metadata have room for a node under every leaf; else the next `head` drafts it."""
    num_nodes = len(it.drafted.tree) + len(it.pruned.tree)
    return it.num_run > 0 and it.shape.depth < it.draft.max_depth and num_nodes <= it.draft.cache.num_free


HELPS: Mapping[str, Callable[[Iteration], bool]] = {
    "noise": _noise_helps,
    "tail": _tail_helps,
    "next_head": _next_head_helps,
}
"""Whether a stage ahead of time has any work; in a plain step none has."""


class PlannedStage(NamedTuple):
    """One placement of a plan, resolved for execution."""

    name: str
    waits: tuple[str, ...]
    helps: Callable[[Iteration], bool] | None
    run: Callable[[Iteration], None]
    on_side: bool


class Executor:
    """Runs iterations by a plan; emits the same tokens as `Engine.step`.

    Args:
        plan: Any valid plan.
        target: Decides every token.
        draft: Proposes tokens.
        trace: Receives the milliseconds of every stage; a stage on "side" times its own run.

    Cost: in addition to the stages a few microseconds per iteration, and a handover per stage on "side". On
    CUDA no sync except those of the stages.
    """

    def __init__(self, plan: Plan, target: TokenModel, draft: TokenModel, trace: StageClock) -> None:
        self.plan = plan
        self.target = target
        self.draft = draft
        self.trace = trace
        self._vocab = 0
        self._side: Side | None = side_of(draft.device) if plan.on_side else None
        self._stages = [self._planned(stage) for stage in plan.order]

    def _planned(self, stage: str) -> PlannedStage:
        on_side = stage in self.plan.on_side
        needed = () if on_side else needs(stage, self.plan.ahead)
        waits = tuple(need for need in needed if need in self.plan.on_side)
        return PlannedStage(stage, waits, HELPS.get(stage), RUN[stage], on_side)

    def step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """Emit one or more tokens; arguments and result are those of `Engine.step`.

        Raises:
            YggError: the target's logits are not finite. After any error the text so far is intact and no
                stage is still running.
        """
        start = time.perf_counter()
        side = self._side
        if side is not None:
            side.join()  # the last step may have been interrupted before it joined
        roll_back_unfinished_(self.target, self.draft, state.root_pos)
        keeps_head = "next_head" in self.plan.ahead
        row = row_of(state, self.target, self.draft)
        it = Iteration(self.target, self.draft, state, policy, row, self._vocab, keeps_head)
        try:
            self._run(it, side)
        finally:
            if side is not None:
                side.join()
        self._vocab = it.logits_KV.shape[1]
        pruned = it.pruned
        result = StepResult(
            tokens=it.accepted.tokens,
            shape=it.shape,
            drafted=len(it.drafted.tree),
            verified=len(pruned.tree),
            context_len=it.root_pos,
            predicted_emitted=pruned.expected_emitted,
            tree_of=lambda: pruned.tree,
            path=it.accepted.path,
            ms=(time.perf_counter() - start) * 1e3,
            caught_up=it.caught_up,
        )
        policy.observe(result)
        return result

    def _run(self, it: Iteration, side: Side | None) -> None:
        stage = self.trace.stage
        for name, waits, helps, run, on_side in self._stages:
            if side is not None:
                for awaited in waits:
                    side.wait(awaited)
            if helps is not None and not helps(it):
                continue
            if on_side and side is not None:
                side.submit(name, partial(self._run_on_side, name, run, it))
            else:
                with stage(name):
                    run(it)

    def _run_on_side(self, name: str, run: Callable[[Iteration], None], it: Iteration) -> None:
        with self.trace.stage(name):
            run(it)
