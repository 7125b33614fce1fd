"""The step over rows in one or two host calls, for a CPU: the functions of kernels/step.cpp.

A pass over the target's weights evicts Python's data from the caches, so a step's dozen calls take ten
times as long as their work. `StepOverRows` in step/rows.py is the specification; a test checks that all
results are equal.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import ctypes
import math
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from yggdrasil.config import ProcessorConfig
from yggdrasil.kernels.threads import one_torch_thread
from yggdrasil.models.packing import Chunk
from yggdrasil.models.protocol import TokenGraphs
from yggdrasil.state import PLAIN, DecodeState, HostHidden, Inspection, Row, Shape, StepMs, StepResult
from yggdrasil.step.accept import choose_rows
from yggdrasil.step.border import (
    FORWARD,
    MASK,
    RESULT,
    ROW,
    TIMES_MS,
    Calls,
    ForwardStruct,
    PromptStruct,
    ReplyStruct,
    ResultStruct,
    RowStruct,
    menu_struct,
)
from yggdrasil.step.choice import Calibration, Choice
from yggdrasil.step.growth import grown
from yggdrasil.step.prune import Pruned
from yggdrasil.step.sampling import BROKEN
from yggdrasil.text.grammar import GrammarState
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

__all__ = ["NativeStep"]

# the value of `StopRule.numbers` for a rule that never stops growth
NEVER = torch.empty(0, dtype=torch.float64), -math.inf
KEPT_RECORDS = 256  # calibrations, stop rules, levels and processors that the C++ step keeps
MOST_DRAFTED = 512  # nodes of a drafted tree
MOST_TOP_K = 2**31  # no vocabulary is larger
DRAFT_STAGES = ("draft", "prune")
VERIFY_STAGES = ("verify", "accept", "commit")
STAGES = DRAFT_STAGES + VERIFY_STAGES


class NativeStep:
    """Runs each step in C++; the results are those of `StepOverRows`.

    Args:
        target: Decides every token. Its forwards are graphs of this process, like the draft's.
        draft: Proposes tokens, over the same rows.
        trace: Receives the milliseconds of every stage.
    """

    def __init__(self, target: TokenGraphs, draft: TokenGraphs, trace: Trace) -> None:
        self._models = (target, draft)
        self._trace = trace
        arguments = [
            argument
            for model in self._models
            for argument in (*_graphs(model), model.cache.storage_PL2GSF, model.cache.pages_BP)
        ]
        self._step: Any = torch.classes.ygg.Step(*arguments, draft.max_depth + 1, draft.num_candidates)
        self._calls = Calls(self._step.address())
        self._records = _Records(self._step)
        self._node_words = 5 + draft.max_depth
        num_rows = len(target.cache.pages_BP)
        self._rows = (num_rows * RowStruct)()
        self._results = (num_rows * ResultStruct)()
        self._forwards = (1024 * ForwardStruct)()
        self._ids = array("q", bytes(16 * num_rows * (draft.max_depth + 1)))
        self._num_verified_words = target.prefill_chunk * self._node_words
        self._num_extra = 0  # words of the drafted trees of rows to inspect
        self._words = array("i", bytes(4 * self._num_verified_words))
        self._values = array("d", bytes(8 * num_rows * MOST_DRAFTED))
        self._reply = ReplyStruct(max_results=num_rows, max_forwards=len(self._forwards))
        self._masks = _Masks()
        self._reply.mask = ctypes.cast(self._masks.callback, ctypes.c_void_p).value
        self._reply.vocab = target.vocab
        self._reply.results = ctypes.addressof(self._results)
        self._reply.forwards = ctypes.addressof(self._forwards)
        for name in ("ids", "words", "values"):
            address, length = getattr(self, f"_{name}").buffer_info()
            setattr(self._reply, name, address)
            setattr(self._reply, f"max_{name}", length)
        self._stepping: list[Row] = []
        self._holders: list[DecodeState] = []  # they have addresses within the target's last output
        self._shapes: list[Shape] = []
        self._started = 0.0
        self._catches_up = False
        self._forwards_of_target = partial(self._forwards_of, 0)
        self._forwards_of_draft = partial(self._forwards_of, 1)

    @staticmethod
    def runs(*models: TokenGraphs) -> bool:
        """Whether C++ can run these models."""
        return all(graph is not None for model in models for graph in _graphs(model)[0])

    @staticmethod
    def supports(choice: Choice) -> bool:
        """Whether C++ knows all stop rules of a choice."""
        return all(shape.stop is None or shape.stop.numbers is not None for shape in choice.shapes)

    def run(self, rows: Sequence[Row], choice: Choice, began: float) -> list[StepResult]:
        """`draft` and `verify` in one call, for a step without prompts.

        Args:
            began: `time.perf_counter` before the choice, which is part of the step's time.
        """
        self._start_(rows, choice.shapes, began)
        self._send_(rows, choice)
        self._forget_hidden_()
        self._masks.call(self._calls.run, self._rows, len(rows), menu_struct(choice.menu), self._reply)
        times_ms = TIMES_MS.read(self._reply)
        self._trace.note(STAGES, self._drafted(times_ms) + times_ms[6:9])
        return self._finish_(times_ms)

    def draft(self, rows: Sequence[Row], choice: Choice) -> int:
        """Draft and prune a tree for every row.

        Returns:
            The number of tokens that these rows verify: roots and kept nodes.
        """
        self._start_(rows, choice.shapes, time.perf_counter())
        self._send_(rows, choice)
        self._masks.call(self._calls.draft, self._rows, len(rows), menu_struct(choice.menu), self._reply)
        times_ms = TIMES_MS.read(self._reply)
        self._trace.note(DRAFT_STAGES, self._drafted(times_ms))
        return int(self._reply.num_tokens)

    def verify(self, joining: Sequence[Row], prompts: Sequence[Chunk]) -> list[StepResult]:
        """Verify, accept and commit the rows of the last `draft`, and rows without a draft.

        Args:
            joining: Rows whose prompt ends in this step.
            prompts: Tokens of rows whose root this step does not reach.

        Returns:
            The results, those of `joining` last. A row whose logits are not finite has an error instead of
            tokens.
        """
        self._fill_(joining, [PLAIN] * len(joining), None)
        tokens = [array("q", prompt.tokens) for prompt in prompts]
        chunks = (len(prompts) * PromptStruct)(
            *(
                PromptStruct(buffer.buffer_info()[0], len(buffer), prompt.start_pos, prompt.row)
                for buffer, prompt in zip(tokens, prompts, strict=True)
            )
        )
        self._forget_hidden_()
        self._masks.call(self._calls.verify, self._rows, len(joining), chunks, len(prompts), self._reply)
        times_ms = TIMES_MS.read(self._reply)
        self._trace.note(VERIFY_STAGES, times_ms[5:9])
        self._stepping += joining
        self._shapes += [PLAIN] * len(joining)
        return self._finish_(times_ms)

    def _drafted(self, times_ms: Sequence[float]) -> tuple[float, ...]:
        """When drafting began and ended, and when pruning ended. Catching up before it is a stage, too."""
        begin_ms, caught_up_ms, _, grown_ms, pruned_ms, *_ = times_ms
        if self._catches_up:
            self._trace.note(("catch up",), (begin_ms, caught_up_ms))
            begin_ms = caught_up_ms
        return begin_ms, grown_ms, pruned_ms

    def logits(self, place: int, path: Sequence[int]) -> Tensor:
        """The target's logits after nodes of the place-th row of the last step, (len(path), V)."""
        root_at = self._results[place].root_at
        logits_NV: Tensor = self._step.logits_and_hidden()[0]
        return logits_NV[[root_at + node for node in path]]

    def _start_(self, rows: Sequence[Row], shapes: Sequence[Shape], began: float) -> None:
        self._started = began
        self._stepping = list(rows)
        self._shapes = list(shapes)
        self._masks.clear()
        self._num_extra = 0
        self._catches_up = False
        for row, shape in zip(rows, shapes, strict=True):
            self._catches_up |= shape.depth > 0 and row.lag > 1

    def _send_(self, rows: Sequence[Row], choice: Choice) -> None:
        self._records.make_room_()
        self._fill_(rows, choice.shapes, choice.calibrations)

    def _fill_(
        self, rows: Sequence[Row], shapes: Sequence[Shape], calibrations: Sequence[Calibration] | None
    ) -> None:
        """Write the rows' structs; they point to the rows' texts."""
        records = self._records
        self._make_room_(rows, shapes)
        for place, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
            sampling = row.state.sampling
            repeats = row.state.repeats
            repeats.follow_(row.state.tokens)
            address, length = repeats.tokens.buffer_info()
            grammar = -1
            forced = num_forced = 0
            if row.state.grammar is not None:
                grammar = self._masks.add(row.state.grammar, row.state.emitted)
                forced, num_forced = self._masks.forced(grammar, shape.graft)
            ROW.write_(
                self._rows,
                place,
                address,
                ctypes.addressof(repeats.evidence),
                forced,
                length,
                row.row,
                row.target_len,
                row.draft_len,
                shape.width,
                shape.depth,
                shape.verify or 0,
                0 if calibrations is None else records.calibration(calibrations[place]),
                records.stop(shape),
                records.levels(shape),
                shape.graft,
                num_forced,
                min(sampling.top_k, MOST_TOP_K),
                sampling.seed,
                records.processors(sampling.processors),
                row.state.prompt_len,
                grammar,
                row.state.inspect,
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                float(row.state.top_logit),
            )

    def _forget_hidden_(self) -> None:
        """Drop the addresses within the target's last output, which its next forward frees.

        Rows get new ones from the results. A step that is interrupted or fails has none to give.
        """
        for state in self._holders:
            state.hidden_of = None
        self._holders.clear()

    def _make_room_(self, rows: Sequence[Row], shapes: Sequence[Shape]) -> None:
        """Let the reply also hold the drafted trees of the rows to inspect."""
        for row, shape in zip(rows, shapes, strict=True):
            if row.state.inspect:
                self._num_extra += shape.num_nodes * (1 + self._node_words)
        needed = self._num_verified_words + self._num_extra
        if needed > len(self._words):
            self._words = array("i", bytes(4 * needed))
            self._reply.words, self._reply.max_words = self._words.buffer_info()

    def _finish_(self, times_ms: Sequence[float]) -> list[StepResult]:
        """Read the results into the rows."""
        begin_ms, caught_up_ms, headed_ms, grown_ms, _, given_ms, verified_ms, *_ = times_ms
        *_, target_ms, draft_ms = times_ms
        target, draft = self._models
        target.record_forwards_(target_ms, self._forwards_of_target)
        draft.record_forwards_(draft_ms, self._forwards_of_draft)
        ms = (time.perf_counter() - self._started) * 1e3
        verify_ms = verified_ms - given_ms
        host_ms = ms - (grown_ms - begin_ms) - verify_ms
        parts = StepMs(headed_ms - caught_up_ms, grown_ms - headed_ms, verify_ms, host_ms)
        return [
            self._result_(row, shape, RESULT.read(self._results, place), ms, parts)
            for place, (row, shape) in enumerate(zip(self._stepping, self._shapes, strict=True))
        ]

    def _forwards_of(self, number: int) -> list[tuple[int, float, float]]:
        """Tokens, start and end of the forwards of a model in the last step."""
        forwards = (FORWARD.read(self._forwards, place) for place in range(self._reply.num_forwards))
        return [(each.num_tokens, each.begin_ms, each.end_ms) for each in forwards if each.model == number]

    def _result_(self, row: Row, shape: Shape, result: Any, ms: float, parts: StepMs) -> StepResult:
        state = row.state
        root_pos = state.root_pos
        middle = result.ids_at + result.path_len
        path = self._ids[result.ids_at : middle].tolist()
        tokens = self._ids[middle : middle + result.path_len].tolist()
        words = self._words[result.words_at : result.words_at + result.verified * self._node_words]
        values = self._values[result.values_at : result.values_at + result.drafted - 1]
        inspection = self._inspection(row, result, words) if state.inspect and tokens else None
        row.draft_len = result.draft_len
        row.target_len = result.target_len
        failure = _failure(state, tokens)
        if not failure:
            state.tokens.extend(tokens)
            as_tensor = partial(self._hidden, result.root_at + path[-1])
            state.hidden_of = HostHidden(result.hidden, result.hidden_bytes, as_tensor)
            self._holders.append(state)
            state.head = None
            if state.sampling.processors is not None:
                state.top_logit = result.top_logit
        return StepResult(
            tokens=[] if failure else tokens,
            shape=grown(shape, result.depth),
            drafted=result.drafted,
            verified=result.verified,
            context_len=root_pos,
            predicted_emitted=result.expected,
            tree_of=partial(_unpacked, words, result.verified),
            path=[] if failure else path,
            ms=ms,
            parts=parts,
            error=failure,
            values=values,
            depths=words[2 * result.verified : 3 * result.verified],  # after tokens and parents
            inspection=None if failure else inspection,
        )

    def _inspection(self, row: Row, result: Any, words: array[int]) -> Inspection:
        """What the reply has after the verified tree, and the target's tokens, before the text grows."""
        begin = result.words_at + len(words)
        middle = begin + result.drafted * self._node_words
        drafted = self._words[begin:middle]
        kept = self._words[middle : middle + result.verified].tolist()
        depths = words[2 * result.verified : 3 * result.verified].tolist()
        pruned = Pruned(_unpacked(words, result.verified), kept, depths, result.expected)
        logits_NV, _ = self._step.logits_and_hidden()
        with one_torch_thread():
            [chosen] = choose_rows([row], [pruned], logits_NV, [result.root_at])
        return Inspection(_unpacked(drafted, result.drafted), kept, chosen.token_K.tolist())

    def _hidden(self, place: int) -> Tensor:
        hidden_NE: Tensor = self._step.logits_and_hidden()[1]
        return hidden_NE[place]


class _Masks:
    """The grammars of the rows of a step, for the only function of Python that the C++ step calls.

    Attributes:
        grammars: By the number in a row's struct.
        callback: The function.
    """

    def __init__(self) -> None:
        self.grammars: list[GrammarState] = []
        self.callback = MASK(self._mask)
        self._forced: list[array[int]] = []
        self._failure: BaseException | None = None

    def add(self, grammar: GrammarState, emitted: Sequence[int]) -> int:
        """The number of a request's grammar, which moves to the end of the text."""
        grammar.follow_(emitted)
        self.grammars.append(grammar)
        return len(self.grammars) - 1

    def forced(self, number: int, most: int) -> tuple[int, int]:
        """Address and number of the tokens that a grammar forces next, at most this many."""
        tokens = array("q", self.grammars[number].forced(most))
        self._forced.append(tokens)
        return tokens.buffer_info()

    def clear(self) -> None:
        """Forget the rows of the last step."""
        self.grammars.clear()
        self._forced.clear()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call C++. Raises what a grammar raised meanwhile, also the interrupt of a user."""
        try:
            function(*arguments)
        except RuntimeError:
            failure = self._failure
            self._failure = None
            if failure is None:
                raise
            raise failure from None

    def _mask(self, place: int, path: Any, length: int) -> int | None:
        try:
            return self.grammars[place].address(tuple(path[:length]) if length else ())
        except BaseException as failure:  # ctypes would print it and go on
            self._failure = failure
            return None


class _Records:
    """Numbers of the calibrations, stop rules and levels that the C++ step knows."""

    def __init__(self, step: Any) -> None:
        self._step = step
        # by identity; the objects are kept, so that no other one gets their id
        self._numbers: dict[int, tuple[int, object]] = {}

    def make_room_(self) -> None:
        """Forget all records if there are too many."""
        if len(self._numbers) > KEPT_RECORDS:
            self._step.forget_()
            self._numbers.clear()

    def calibration(self, calibration: Calibration) -> int:
        known = self._numbers.get(id(calibration))
        if known is not None:
            return known[0]
        platt = calibration.platt
        return self._keep_(
            calibration, self._step.add_calibration(platt.slope, platt.offset, calibration.knots)
        )

    def stop(self, shape: Shape) -> int:
        if shape.stop is None or shape.levels is not None:
            return -1
        known = self._numbers.get(id(shape.stop))
        if known is not None:
            return known[0]
        return self._keep_(shape.stop, self._step.add_stop(*(shape.stop.numbers or NEVER)))

    def levels(self, shape: Shape) -> int:
        if shape.levels is None:
            return -1
        known = self._numbers.get(id(shape.levels))
        if known is not None:
            return known[0]
        return self._keep_(shape.levels, self._step.add_levels(*_by_level(shape.levels)))

    def processors(self, processors: ProcessorConfig | None) -> int:
        if processors is None:
            return -1
        known = self._numbers.get(id(processors))
        if known is not None:
            return known[0]
        return self._keep_(processors, self._step.add_processors(*_numbers_of(processors)))

    def _keep_(self, record: object, number: int) -> int:
        self._numbers[id(record)] = number, record
        return number


def _failure(state: DecodeState, tokens: Sequence[int]) -> str:
    """Why a step emits nothing; empty if it emits these tokens."""
    if not tokens:
        return BROKEN
    return "" if state.grammar is None else state.grammar.failure(tokens)


def _numbers_of(processors: ProcessorConfig) -> tuple[Any, ...]:
    """The arguments of `add_processors`."""
    return (
        [token for token, _ in processors.logit_bias],
        [value for _, value in processors.logit_bias],
        processors.repetition_penalty,
        processors.presence_penalty,
        processors.frequency_penalty,
        processors.no_repeat_ngram_size,
        [list(sequence) for sequence in processors.banned],
        processors.min_tokens,
        list(processors.ends),
    )


def _by_level(levels: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[list[int]], list[list[int]]]:
    """The parents of every level, and the ranks."""
    return [[parent for parent, _ in level] for level in levels], [
        [rank for _, rank in level] for level in levels
    ]


def _unpacked(words: array[int], length: int) -> TokenTree:
    return TokenTree.unpacked(torch.frombuffer(words, dtype=torch.int32), length)


def _graphs(model: TokenGraphs) -> tuple[list[Any], list[Tensor]]:
    """All graphs of a model by ascending size, and the metadata of each."""
    metas = [model.meta(size) for size in model.sizes]
    return [model.graph_object(meta_NM) for meta_NM in metas], metas
