"""A step without a plan in one host call, for a CPU.

A pass over the target's weights evicts Python's data from the caches, so the eight calls of a step take ten
times as long as their work. Here they are one call of kernels/graph.cpp, over the same operators in the
same order. `Engine.step` is its specification; a test checks that all results are equal.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from yggdrasil.errors import YggError
from yggdrasil.kernels import kernel_library
from yggdrasil.models.protocol import TokenModel
from yggdrasil.policy.shape import NativeCosts, ShapePolicy
from yggdrasil.state import DecodeState, Shape, StepResult
from yggdrasil.step.accept import Accepted, accept
from yggdrasil.step.commit import commit_, roll_back_unfinished_
from yggdrasil.step.draft import NEVER, grown
from yggdrasil.step.prune import Pruned
from yggdrasil.step.sampling import BROKEN
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

__all__ = ["NativeStep"]

ARGUMENTS: tuple[Any, ...] = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    *[ctypes.c_int64] * 8,
    *[ctypes.c_void_p, ctypes.c_int64] * 3,
)
"""Types of `ygg_step_run`, kernels/graph.h. A call through torch takes a quarter of the host time."""

STAGES = ("policy", "draft", "prune", "verify", "accept", "commit")

ByStages = Callable[[DecodeState, ShapePolicy, Shape, float], StepResult]


class NativeStep:
    """Runs each iteration in one call; the results are those of `Engine.step`.

    Args:
        target: Decides every token. Its forwards are graphs of this process, like the draft's.
        draft: Proposes tokens.
        trace: Receives the milliseconds of every stage.
        by_stages: `Engine.step_with`, for what the call does not support: static trees, stop rules and
            policies that exist only in Python, a draft that lags by more than a chunk, the end of the
            context.

    Cost: host time of about ten operators; sampling draws and filters in Python after the call.
    """

    def __init__(self, target: TokenModel, draft: TokenModel, trace: Trace, by_stages: ByStages) -> None:
        self._target = target
        self._draft = draft
        self._trace = trace
        self._by_stages = by_stages
        models = [
            argument
            for model in (target, draft)
            for argument in (*_graphs(model), model.cache.storage_PL2GSF)
        ]
        self._sent: tuple[object, object, object, object] = (None, None, None, None)
        self._native: Any = torch.classes.ygg.Step(*models, draft.max_depth + 1, draft.num_candidates)
        self._address = self._native.address()
        self._call: Any = kernel_library().ygg_step_run
        self._call.argtypes = ARGUMENTS
        self._call.restype = ctypes.c_int64
        max_nodes = target.prefill_chunk
        self._node_words = 5 + draft.max_depth
        self._tail = array("q", bytes(8 * (max_nodes + draft.prefill_chunk)))
        self._numbers = array("d", bytes(8 * (16 + 2 * max_nodes + 4 * draft.max_depth)))
        self._tree = array("i", bytes(4 * max_nodes * self._node_words))
        self._error = ctypes.create_string_buffer(1024)
        # addresses and lengths, which never change
        self._out = [part for buffer in (self._numbers, self._tree) for part in buffer.buffer_info()]

    @staticmethod
    def runs(*models: TokenModel) -> bool:
        """Whether one call can run these models."""
        return all(
            model.device == "cpu" and all(graph is not None for graph in _graphs(model)[0])
            for model in models
        )

    def step(self, state: DecodeState, policy: ShapePolicy) -> StepResult:
        """Emit one or more tokens; arguments, result and errors are those of `Engine.step`."""
        began = time.perf_counter()
        target = self._target
        draft = self._draft
        root_pos = state.root_pos
        start = began * 1e3
        roll_back_unfinished_(target, draft, root_pos)
        shape = policy.choose(state)
        costs = policy.native_costs
        if costs is None or not self._supports(shape, costs, root_pos):
            self._trace.note(STAGES[:1], (start, time.perf_counter() * 1e3))
            return self._by_stages(state, policy, shape, began)
        self._send_policy_(policy, shape, costs)
        target_len = target.cache.len
        draft_len = draft.cache.len if shape.depth else root_pos
        first = min(target_len, draft_len)
        is_greedy = state.sampling.temperature == 0
        size = (shape.width, shape.depth, shape.verify or 0)
        numbers = self._run(state.tokens[first:], first, target_len, draft_len, *size, is_greedy)
        expected = numbers[0]
        drafted, verified, kept_len, num_nodes = map(int, numbers[1:5])
        nodes = [*map(int, numbers[5 : 5 + num_nodes])]
        target_ms = numbers[5 + num_nodes : 7 + num_nodes]
        times_ms = numbers[7 + num_nodes :]
        num_stages = 5 if is_greedy else 3
        self._trace.note(STAGES[: num_stages + 1], (start, *times_ms[: num_stages + 1]))
        target.record_forward_(root_pos - target_len + verified, target_ms)
        tree_of = partial(_unpacked, self._tree[: verified * self._node_words], verified)
        if shape.depth:
            draft.record_forward_(root_pos + 1 - draft_len, times_ms[num_stages + 1 : num_stages + 3])
            draft.record_forward_(shape.width, times_ms[num_stages + 3 :])
            draft.cache.kept_(kept_len)
        if not is_greedy:
            num_run = drafted - shape.width if shape.depth else 0
            accepted = self._accept(state, Pruned(tree_of(), nodes, expected), num_run)
        elif not nodes:
            raise YggError(BROKEN)
        else:
            accepted = Accepted(nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
            target.cache.kept_(root_pos + len(accepted.path))
            state.tokens.extend(accepted.tokens)
            state.hidden_of = partial(self._hidden, accepted.path[-1])
            state.head = None
        result = StepResult(
            tokens=accepted.tokens,
            shape=grown(shape, (drafted - 1) // shape.width),
            drafted=drafted,
            verified=verified,
            context_len=root_pos,
            predicted_emitted=expected,
            tree_of=tree_of,
            path=accepted.path,
            ms=time.perf_counter() * 1e3 - start,
        )
        policy.observe(result)
        return result

    def _supports(self, shape: Shape, costs: NativeCosts, root_pos: int) -> bool:
        """Whether the call can run this shape here, together with the text that the caches lack."""
        target = self._target
        draft = self._draft
        num_nodes = shape.num_nodes
        if shape.levels is not None or (shape.stop is not None and shape.stop.native is None):
            return False
        if shape.depth and (
            root_pos - draft.cache.len >= draft.prefill_chunk
            or root_pos + num_nodes > draft.cache.shape.capacity
        ):
            return False
        verified = min(num_nodes, shape.verify or costs[-1][-2])
        return (
            root_pos - target.cache.len + verified <= target.prefill_chunk
            and root_pos + verified <= target.cache.shape.capacity
        )

    def _run(self, tail: list[int], *arguments: int) -> array[float]:
        """The numbers that graph.h describes, as an array: a list would take 10 us to make.

        The tree's arrays are written to their buffer.
        """
        self._tail[: len(tail)] = array("q", tail)
        count = self._call(
            self._address,
            self._tail.buffer_info()[0],
            len(tail),
            *arguments,
            *self._out,
            self._error,
            len(self._error),
        )
        if count < 0:
            raise RuntimeError(self._error.value.decode(errors="replace"))
        return self._numbers[:count]

    def _hidden(self, node: int) -> Tensor:
        hidden_KE: Tensor = self._native.logits_and_hidden()[1]
        return hidden_KE[node]

    def _accept(self, state: DecodeState, pruned: Pruned, num_run: int) -> Accepted:
        """Accept and commit in Python: sample tokens for a tree that is verified but not committed."""
        logits_KV, hidden_KE = self._native.logits_and_hidden()
        self._target.cache.kept_(state.root_pos)
        with self._trace.stage("accept"):
            accepted = accept(pruned.tree, logits_KV, state.root_pos, state.sampling)
        with self._trace.stage("commit"):
            commit_(state, self._target, self._draft, pruned, accepted, num_run, hidden_KE)
        return accepted

    def _send_policy_(self, policy: ShapePolicy, shape: Shape, costs: NativeCosts) -> None:
        """Send the policy's parameters to the native step, if they have changed."""
        platt = policy.platt
        knots = policy.knots
        sent_costs, sent_platt, sent_stop, sent_knots = self._sent
        if costs is sent_costs and platt is sent_platt and shape.stop is sent_stop and knots is sent_knots:
            return
        self._sent = (costs, platt, shape.stop, knots)
        stop = NEVER if shape.stop is None else shape.stop.native or NEVER
        self._native.follow_policy_(platt.slope, platt.offset, *stop, knots, *costs)


def _unpacked(words: array[int], length: int) -> TokenTree:
    return TokenTree.unpacked(torch.frombuffer(words, dtype=torch.int32), length)


def _graphs(model: TokenModel) -> tuple[list[Any], list[Tensor]]:
    """All graphs of a model by ascending size, and the metadata of each."""
    metas = [model.meta(size) for size in model.sizes]
    return [model.native(meta_NM) for meta_NM in metas], metas
