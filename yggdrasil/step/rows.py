"""The step: every row drafts a tree of its own, and all rows share each forward.

    draft       the draft model grows a tree of candidate tokens under the last token of every row
    prune       the subtrees with the most expected tokens per millisecond are kept
    verify      the target runs all their nodes in one forward
    choose      the target's own token after every node
    accept      the path on which a tree has the target's own tokens, plus one bonus token
    commit      the path's KV is kept in both models' caches, and its tokens are added to the text

A chain is a tree of width 1, plain decoding a tree of depth 0, a single request a batch of one. Only
pruning looks at all rows together.

This is the specification of kernels/step.cpp, in torch alone; on CUDA it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from yggdrasil.errors import YggError
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.staging import upload
from yggdrasil.state import PLAIN, Head, Inspection, Row, StepResult
from yggdrasil.step.accept import Accepted, choose_rows, follow, grammar_masks, grammar_paths
from yggdrasil.step.ahead import Verified, draft_heads, draw_ahead, run_tails
from yggdrasil.step.choice import Choice, VerifyMenu
from yggdrasil.step.growth import RowDraft, catch_up_rows_, draft_rows
from yggdrasil.step.plan import SEQUENTIAL, Plan, needs
from yggdrasil.step.prune import ROOT_ALONE, DraftedNodes, Pruned, drafted_nodes, prune_rows
from yggdrasil.step.sampling import TargetTokens
from yggdrasil.step.side import Side, side_of
from yggdrasil.step.verify import undrafted, verify_rows
from yggdrasil.trace import Trace

__all__ = ["StepOverRows", "commit_row_"]


def commit_row_(
    target: TokenGraphs,
    draft: TokenGraphs,
    row: Row,
    drafted: RowDraft,
    pruned: Pruned,
    accepted: Accepted,
    head: Head | None = None,
) -> None:
    """Keep the accepted path in both models' KV and add its tokens to the text.

    The target has KV of every verified node. The draft has KV of the nodes that it ran: all but those of
    the last growth step. So the end of the path may be left to the next draft.

    Args:
        head: The draft's candidates after the next root, if they were drafted ahead of time; that root's KV
            stays provisional.

    Cost: one gather and scatter per model whose path is not a chain already. No sync.

    An interrupt loses this step, never the text before it, whose KV does not change.
    """
    root_pos = row.state.root_pos
    target.cache.keep_(row.row, root_pos, accepted.path)
    row.target_len = root_pos + len(accepted.path)
    if drafted.num_run:
        nodes = [pruned.drafted_node[node] for node in accepted.path]
        kept = [node for node in nodes if node < drafted.num_run]
        next_root = [] if head is None else [len(drafted.tree) + accepted.path[-1]]
        draft.cache.keep_(row.row, root_pos, kept + next_root)
        row.draft_len = root_pos + len(kept)
    row.state.head = head
    row.state.tokens.extend(accepted.tokens)


# ---- the stages in the order of a plan ----


class _Batch:
    """The data of one step; stages write it and later stages read it."""

    def __init__(self, rows: Sequence[Row], choice: Choice) -> None:
        self.rows = list(rows)
        self.choice = choice
        self.drafts: list[RowDraft] = []
        self.nodes: list[DraftedNodes] = []
        self.pruned: list[Pruned] = []
        self.prompts: Sequence[Chunk] = ()
        self.logits_NV = torch.empty(0, 0)
        self.hidden_NE = torch.empty(0, 0)
        self.roots: list[int] = []
        self.masks: list[Tensor | None] = []
        self.chosen: list[TargetTokens] = []
        # by place of the row: the draft's candidates after every verified node's next token
        self.next: dict[int, tuple[Tensor, Tensor]] = {}
        self.accepted: list[Accepted | YggError] = []
        self.root_positions: list[int] = []


NO_CHOICE = Choice((), (), VerifyMenu((0,), (1.0,)))


class StepOverRows:
    """One step after another, each in two calls: `draft`, then `verify`; or in one, `run`.

    Args:
        target: The target, over pages of the rows.
        draft: The draft, over the same page table.
        trace: Gets the milliseconds of the stages, also of "catch up".
        plan: The order of the stages, and what runs ahead of time.

    Cost: in addition to the stages a few microseconds a step, and a handover per stage on "side". On CUDA
    no sync except those of the stages.
    Source: Yggdrasil sections 4 and 5; over rows, Nightjar section 3.1.
    """

    def __init__(
        self, target: TokenGraphs, draft: TokenGraphs, trace: Trace, plan: Plan = SEQUENTIAL
    ) -> None:
        self.plan = plan
        self._target = target
        self._draft_model = draft
        self._trace = trace
        self._side: Side | None = side_of(draft.device) if plan.on_side else None
        split = plan.order.index("verify")
        self._first = plan.order[:split]
        self._second = plan.order[split:]
        self._draft_ms = 0.0
        self._batch = _Batch((), NO_CHOICE)
        self._verified = self._batch
        self._stages: Mapping[str, Callable[[_Batch], None]] = {
            "draft": self._draft_,
            "noise": self._noise_,
            "tail": self._tail_,
            "prune": self._prune_,
            "verify": self._verify_,
            "choose": self._choose_,
            "next_head": self._next_head_,
            "accept": self._accept_,
            "commit": self._commit_,
        }

    def run(self, rows: Sequence[Row], choice: Choice, began: float) -> list[StepResult]:
        """`draft` and `verify` of a step without prompts.

        Args:
            began: `time.perf_counter` before the choice, which is part of the step's time.
        """
        choice_ms = (time.perf_counter() - began) * 1e3
        self.draft(rows, choice)
        self._draft_ms += choice_ms
        return self.verify((), ())

    def draft(self, rows: Sequence[Row], choice: Choice) -> int:
        """The first half of a step: draft and prune. Without decoding rows it may be left out.

        Args:
            rows: The rows that decode, with pages for their trees.
            choice: A shape and a calibration for every row, and the menu of the batch.

        Returns:
            The number of tokens that these rows verify: roots and kept nodes.

        Raises:
            RuntimeError: as `draft_rows`.

        Cost: that of `catch_up_rows_`, `draft_rows` and `prune_rows`.
        """
        began = time.perf_counter()
        self._join()  # the last step may have been interrupted before it joined
        self._batch = _Batch(rows, choice)
        self._catch_up_(self._batch)
        self._run_(self._first, self._batch)
        self._draft_ms = (time.perf_counter() - began) * 1e3
        return sum(len(each.tree) for each in self._batch.pruned)

    def verify(self, joining: Sequence[Row], prompts: Sequence[Chunk]) -> list[StepResult]:
        """The second half: verify, accept and commit.

        Args:
            joining: Rows that emit without a draft: those whose prompt ends in this step.
            prompts: Tokens of other rows' prompts for the same forward. The caller counts them in.

        Returns:
            A result for every row, decoding rows first, then joining ones. A row whose logits are not
            finite has an error, and nothing of it is committed.

        Raises:
            ShapeNotCompiled: more tokens than the menu's largest graph; nothing is committed.

        Cost: one forward of the target and one sync.
        """
        began = time.perf_counter()
        batch = self._batch
        if joining:
            self._join_rows_(batch, joining)
        batch.prompts = prompts
        batch.root_positions = [row.state.root_pos for row in batch.rows]
        before_ms = self._draft_ms
        self._batch = _Batch((), NO_CHOICE)
        self._draft_ms = 0.0
        self._verified = batch
        self._run_(self._second, batch)
        ms = before_ms + (time.perf_counter() - began) * 1e3
        return [_result(batch, place, ms) for place in range(len(batch.rows))]

    def _join_rows_(self, batch: _Batch, joining: Sequence[Row]) -> None:
        """Add rows without a draft."""
        if self._side is not None:
            for stage in self.plan.on_side:
                self._side.wait(stage)  # it may read the rows, and replace the drafts
        plain = undrafted(self._target, joining)
        batch.rows += joining
        batch.pruned += plain
        batch.drafts += [RowDraft(each.tree, 0, PLAIN) for each in plain]
        batch.nodes += [ROOT_ALONE] * len(plain)

    def logits(self, place: int, path: Sequence[int]) -> Tensor:
        """(len(path), V) the target's logits after some nodes of a row of the last step.

        Args:
            place: Of the row among the results of `verify`.
            path: Nodes of its verified tree.

        Cost: one gather, no sync. Only until the target's next forward.
        """
        batch = self._verified
        nodes = upload([batch.roots[place] + node for node in path], batch.logits_NV.device)
        return batch.logits_NV.index_select(0, nodes)

    def _run_(self, stages: Sequence[str], batch: _Batch) -> None:
        try:
            for stage in stages:
                self._run_stage_(stage, batch)
        except BaseException:
            self._join()
            raise
        if stages[-1] == "commit":
            self._join()

    def _run_stage_(self, stage: str, batch: _Batch) -> None:
        """Run a stage or hand it over to "side"; one that has no work in this step is left out."""
        on_side = self.plan.on_side
        run = self._stages[stage]
        if stage in on_side and self._side is not None:
            if self._has_work(stage, batch):
                self._side.submit(stage, partial(self._timed_, stage, run, batch))
            return
        if self._side is not None:
            for need in needs(stage, self.plan.ahead):
                if need in on_side:
                    self._side.wait(need)
        if self._has_work(stage, batch):
            self._timed_(stage, run, batch)

    def _timed_(self, stage: str, run: Callable[[_Batch], None], batch: _Batch) -> None:
        with self._trace.stage(stage):
            run(batch)

    def _join(self) -> None:
        if self._side is not None:
            self._side.join()

    def _has_work(self, stage: str, batch: _Batch) -> bool:
        """Whether a stage that runs ahead of time has any work; in a plain step none has."""
        match stage:
            case "noise":
                sampled = [row.state.sampling.temperature > 0 for row in batch.rows]
                return any(sampled) and any(each.num_run for each in batch.drafts)
            case "tail":
                return any(0 < each.num_run < len(each.tree) for each in batch.drafts)
            case "next_head":
                return any(map(partial(self._has_room, batch), range(len(batch.rows))))
        return True

    def _has_room(self, batch: _Batch, place: int) -> bool:
        """Whether a row drafted, and metadata and KV of the draft hold a node under every verified one.

        Read before the tail on "side" has ended, so it does not depend on it.
        """
        drafted = batch.drafts[place]
        num_nodes = len(drafted.tree) + len(batch.pruned[place].tree)
        room = self._draft_model.cache.shape.capacity - batch.root_positions[place]
        return (
            drafted.num_run > 0 and drafted.shape.depth < self._draft_model.max_depth and num_nodes <= room
        )

    def _catch_up_(self, batch: _Batch) -> None:
        drafting = [row for row, shape in zip(batch.rows, batch.choice.shapes, strict=True) if shape.depth]
        if any(row.lag > 1 for row in drafting):
            with self._trace.stage("catch up"):
                catch_up_rows_(self._draft_model, drafting)

    def _draft_(self, batch: _Batch) -> None:
        spare = 2 if "next_head" in self.plan.ahead else 1
        vocab = self._target.vocab
        batch.drafts = draft_rows(self._draft_model, batch.rows, batch.choice, vocab=vocab, spare=spare)

    def _noise_(self, batch: _Batch) -> None:
        draw_ahead(batch.rows, batch.drafts, self._target.vocab, self._target.device)

    def _tail_(self, batch: _Batch) -> None:
        batch.drafts = run_tails(self._draft_model, batch.rows, batch.drafts)

    def _prune_(self, batch: _Batch) -> None:
        batch.nodes = drafted_nodes(batch.drafts, batch.choice)
        batch.pruned = prune_rows(batch.drafts, batch.nodes, batch.choice.menu)

    def _verify_(self, batch: _Batch) -> None:
        paths = grammar_paths(batch.rows, batch.pruned)  # before the launch: a sync would wait for it
        batch.logits_NV, batch.hidden_NE, batch.roots = verify_rows(
            self._target, batch.rows, batch.pruned, batch.prompts
        )
        batch.masks = grammar_masks(batch.rows, paths, self._target.device)

    def _choose_(self, batch: _Batch) -> None:
        batch.chosen = choose_rows(batch.rows, batch.pruned, batch.logits_NV, batch.roots, batch.masks)

    def _next_head_(self, batch: _Batch) -> None:
        places = [place for place in range(len(batch.rows)) if self._has_room(batch, place)]
        nodes = [
            Verified(
                batch.rows[place],
                batch.drafts[place].tree,
                batch.pruned[place].drafted_node,
                batch.chosen[place].token_K,
            )
            for place in places
        ]
        batch.next = dict(zip(places, draft_heads(self._draft_model, nodes), strict=True))

    def _accept_(self, batch: _Batch) -> None:
        followed = follow([each.tree for each in batch.pruned], batch.chosen)
        batch.accepted = [
            _decided(row, accepted) for row, accepted in zip(batch.rows, followed, strict=True)
        ]

    def _commit_(self, batch: _Batch) -> None:
        for place, accepted in enumerate(batch.accepted):
            if isinstance(accepted, YggError):
                continue
            row = batch.rows[place]
            last = accepted.path[-1]
            head = None
            if place in batch.next:
                tokens_KM, log_probs_KM = batch.next[place]
                node = slice(last, last + 1)
                head = Head(row.state.root_pos + len(accepted.path), tokens_KM[node], log_probs_KM[node])
            if row.state.sampling.processors is not None:
                row.state.top_logit = batch.chosen[place].score_K[last]
            row.state.hidden_of = partial(batch.hidden_NE.select, 0, batch.roots[place] + last)
            drafted = batch.drafts[place]
            commit_row_(self._target, self._draft_model, row, drafted, batch.pruned[place], accepted, head)


def _decided(row: Row, accepted: Accepted | YggError) -> Accepted | YggError:
    """What the target accepts, or an error if a grammar could not decide one of the tokens."""
    if row.state.grammar is None or isinstance(accepted, YggError):
        return accepted
    failure = row.state.grammar.failure(accepted.tokens)
    return YggError(failure) if failure else accepted


def _result(batch: _Batch, place: int, ms: float) -> StepResult:
    drafted = batch.drafts[place]
    nodes = batch.nodes[place]
    pruned = batch.pruned[place]
    accepted = batch.accepted[place]
    error = str(accepted) if isinstance(accepted, YggError) else ""
    emitted = Accepted([], []) if isinstance(accepted, YggError) else accepted
    inspection = None
    if batch.rows[place].state.inspect and not error:
        tokens = batch.chosen[place].token_K.tolist()  # sync: a request for inspection
        kept = [nodes.ids.index(node) for node in pruned.drafted_node]
        inspection = Inspection(drafted.tree.subtree(nodes.ids), kept, tokens)
    return StepResult(
        tokens=emitted.tokens,
        shape=drafted.shape,
        drafted=len(nodes.ids),
        verified=len(pruned.tree),
        context_len=batch.root_positions[place],
        predicted_emitted=pruned.expected_emitted,
        tree_of=lambda: pruned.tree,
        path=emitted.path,
        ms=ms,
        error=error,
        values=nodes.values,
        depths=pruned.depths,
        inspection=inspection,
    )
