"""Run an iteration by a plan: the same calls as `Engine.step`, in the plan's order, some ahead of time,
some beside the others.
"""

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
from yggdrasil.state import PLAIN, DecodeState, Head, Shape, StepResult
from yggdrasil.step.accept import Accepted, follow, say
from yggdrasil.step.commit import commit_draft_, commit_text_, forget_unfinished_
from yggdrasil.step.draft import Drafted, catch_up_, draft, grow, head_draft, run_nodes
from yggdrasil.step.prune import Pruned, prune
from yggdrasil.step.sampling import Said, gumbel_noise
from yggdrasil.step.verify import verify

__all__ = ["Executor", "StageClock"]


class StageClock(Protocol):
    """Times stages: a `Trace`, or one that asks the device."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the block as one run of stage `name`."""
        ...


@dataclass
class Iteration:
    """What the stages of one iteration hand to each other; each field is written by one stage and read by
    later ones.

    Attributes:
        vocab: V, 0 until the target has run once.
        keeps_head: Whether the plan drafts the next head ahead of time.
        num_run: Nodes of the drafted tree, from the root on, with KV in the draft's cache.
        said: The target's own token after every verified node.
        after_said: The draft's candidates after those tokens and their log-probabilities, (K, C) each,
            where next_head ran.
        next_head: The one of them that the text takes.
    """

    target: TokenModel
    draft: TokenModel
    state: DecodeState
    policy: ShapePolicy
    root_pos: int
    vocab: int
    keeps_head: bool
    shape: Shape = field(init=False)
    head: Head = field(init=False)
    drafted: Drafted = field(init=False)
    num_run: int = field(init=False)
    pruned: Pruned = field(init=False)
    logits_KV: Tensor = field(init=False)
    hidden_KE: Tensor = field(init=False)
    said: Said = field(init=False)
    accepted: Accepted = field(init=False)
    caught_up: bool = False
    after_said: tuple[Tensor, Tensor] | None = None
    next_head: Head | None = None


def _policy(it: Iteration) -> None:
    it.shape = it.policy.choose(it.state)


def _head(it: Iteration) -> None:
    """The head drafted ahead of time when it is of this very root; used up either way, so that no
    interrupted iteration leaves one behind.
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
        it.drafted = grow(
            it.draft,
            it.state,
            it.shape,
            it.head,
            it.policy.platt,
            spare=it.shape.num_nodes if it.keeps_head else 0,
        )
    it.num_run, it.shape = it.drafted.num_run, it.drafted.shape


def _noise(it: Iteration) -> None:
    for position in range(it.root_pos + 1, it.root_pos + it.shape.depth + 2):
        gumbel_noise(it.state.sampling.seed, position, it.vocab, it.target.device)


def _tail(it: Iteration) -> None:
    tree = it.drafted.tree
    run_nodes(it.draft, tree, it.num_run, len(tree), it.root_pos)
    it.num_run = len(tree)


def _prune(it: Iteration) -> None:
    it.pruned = prune(
        it.drafted.tree, it.shape, it.policy, it.root_pos, lag=it.root_pos - it.target.cache.len
    )


def _verify(it: Iteration) -> None:
    it.logits_KV, it.hidden_KE = verify(it.target, it.pruned.tree, it.state.tokens)


def _say(it: Iteration) -> None:
    it.said = say(it.pruned.tree, it.logits_KV, it.root_pos, it.state.sampling)


def _next_head(it: Iteration) -> None:
    """One node under every verified node, with what the target said there; only one of them will be the
    next root.
    """
    # the same arrays with a length of its own: `walk` must not see these nodes
    tree = copy(it.drafted.tree)
    first = len(tree)
    parents_K = upload(it.pruned.drafted_node, it.said.token_K.device)
    tree.grow(parents_K, it.said.token_K, tree.log_prob_N[parents_K])
    it.after_said = run_nodes(it.draft, tree, first, len(tree), it.root_pos)


def _walk(it: Iteration) -> None:
    it.accepted = follow(it.pruned.tree, it.said)


def _commit_target(it: Iteration) -> None:
    it.target.cache.commit_(it.accepted.path)


def _commit_draft(it: Iteration) -> None:
    """The path; and the next root behind it as a provisional index, where its KV is there already."""
    if it.after_said is None:
        return commit_draft_(it.draft, it.pruned, it.accepted, it.num_run)
    path = it.accepted.path
    cache = it.draft.cache
    last = path[-1]
    cache.commit_([*(it.pruned.drafted_node[node] for node in path), len(it.drafted.tree) + last])
    cache.rollback_(cache.len - 1)
    it.next_head = Head(it.root_pos + len(path), *it.after_said, last)
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
    "say": _say,
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
    """Where the cache has no room or metadata no depth for a node under every leaf, the next iteration
    drafts its head itself.
    """
    num_nodes = len(it.drafted.tree) + len(it.pruned.tree)
    return it.num_run > 0 and it.shape.depth < it.draft.max_depth and num_nodes <= it.draft.cache.num_free


HELPS: Mapping[str, Callable[[Iteration], bool]] = {
    "noise": _noise_helps,
    "tail": _tail_helps,
    "next_head": _next_head_helps,
}
"""Whether a stage ahead of time has anything to do; nothing does in a plain step."""


class Turn(NamedTuple):
    """One placement, resolved: what to wait for, whether to run at all, what, and where."""

    name: str
    waits: tuple[str, ...]
    helps: Callable[[Iteration], bool] | None
    run: Callable[[Iteration], None]
    beside: bool


class Executor:
    """Runs iterations by a plan, token for token what `Engine.step` emits.

    Args:
        plan: Any valid one.
        target: Decides every token.
        draft: Guesses.
        trace: Gets the milliseconds of every stage, by name; a stage on "side" times its own run.

    Cost: beyond the stages a few microseconds per iteration, and a handover per stage on "side". On CUDA no
    sync but the stages' own."""

    def __init__(self, plan: Plan, target: TokenModel, draft: TokenModel, trace: StageClock) -> None:
        self.plan = plan
        self.target = target
        self.draft = draft
        self.trace = trace
        self._vocab = 0
        self._side: Side | None = side_of(draft.device) if plan.beside else None
        self._turns = [self._turn(stage) for stage in plan.order]

    def _turn(self, stage: str) -> Turn:
        beside = stage in self.plan.beside
        waits = (
            ()
            if beside
            else tuple(need for need in needs(stage, self.plan.ahead) if need in self.plan.beside)
        )
        return Turn(stage, waits, HELPS.get(stage), RUN[stage], beside)

    def step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """Emit one or more tokens; the contract of `Engine.step`.

        Args:
            state: The request; its tokens are extended by what is emitted.
            policy: Chooses the shape.

        Raises:
            YggError: the target's logits are not finite; whatever is raised, the text so far is intact and
                nothing runs on.
        """
        start = time.perf_counter()
        side = self._side
        if side is not None:
            side.join()  # an interrupt may have struck while the last step was being cleared away
        forget_unfinished_(self.target, self.draft, state.root_pos)
        it = Iteration(
            self.target,
            self.draft,
            state,
            policy,
            state.root_pos,
            self._vocab,
            "next_head" in self.plan.ahead,
        )
        try:
            self._run(it, side)
        finally:
            if side is not None:
                side.join()
        self._vocab = it.logits_KV.shape[1]
        pruned = it.pruned
        path = it.accepted.path
        ms = (time.perf_counter() - start) * 1e3
        sizes = len(it.drafted.tree), len(pruned.tree)
        result = StepResult(
            it.accepted.tokens,
            it.shape,
            *sizes,
            it.root_pos,
            pruned.expected_emitted,
            lambda: pruned.tree,
            path,
            ms,
            it.caught_up,
        )
        policy.observe(result)
        return result

    def _run(self, it: Iteration, side: Side | None) -> None:
        stage = self.trace.stage
        for name, waits, helps, run, beside in self._turns:
            if side is not None:
                for awaited in waits:
                    side.wait(awaited)
            if helps is not None and not helps(it):
                continue
            if beside and side is not None:
                side.submit(name, partial(self._run_beside, name, run, it))
            else:
                with stage(name):
                    run(it)

    def _run_beside(self, name: str, run: Callable[[Iteration], None], it: Iteration) -> None:
        with self.trace.stage(name):
            run(it)
