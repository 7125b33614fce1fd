"""The step over rows in C++ against its specification: equal results and equal KV over random histories.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from yggdrasil.config import GenerateConfig, GrammarConfig, ProcessorConfig, SamplingConfig, ServeConfig
from yggdrasil.engine import grammar_of
from yggdrasil.models.packing import Chunk
from yggdrasil.page_order import by_slot
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.stopping import LowConfidence, SmallGain
from yggdrasil.schedule.search import plans
from yggdrasil.serve.load import load_batcher
from yggdrasil.state import PLAIN, DecodeState, Row, Shape, StepResult
from yggdrasil.step import rows as rows_module
from yggdrasil.step.ahead import run_tails
from yggdrasil.step.choice import Choice, VerifyMenu, verify_most
from yggdrasil.step.growth import RowDraft
from yggdrasil.step.native import NativeStep
from yggdrasil.step.plan import Plan
from yggdrasil.step.rows import StepOverRows
from yggdrasil.text.grammar import GrammarState
from yggdrasil.trace import Trace

ROWS = 5
LEVELS = (((0, 0), (0, 1), (0, 2)), ((1, 0), (1, 1), (2, 0)), ((4, 0),))
SHAPES = (
    PLAIN,
    Shape(1, 1),
    Shape(1, 4),
    Shape(1, 4, 3),
    Shape(4, 4),
    Shape(4, 3, 6),
    Shape(2, 3),
    Shape(4, 4, stop=SmallGain(4, (0.0, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3), 0.4)),
    Shape(4, 3, stop=SmallGain(4, (0.0,) * 3, 0.05)),
    Shape(2, 4, stop=SmallGain(2, (0.0, 0.0, 0.1, 0.1, 0.1, 0.5), 0.15)),
    Shape(1, 4, stop=LowConfidence(0.5)),
    Shape(3, 3, 8, LEVELS),
    Shape(1, 0, graft=3),
    Shape(1, 0, 2, graft=15),
    Shape(1, 4, graft=2),
    Shape(4, 2, graft=15),
    Shape(4, 4, 6, graft=3),
    Shape(2, 4, stop=SmallGain(2, (0.0, 0.0, 0.1, 0.1, 0.1, 0.5), 0.15), graft=2),
)
# five rows and 20 nodes fit in the largest graph, of 32 tokens
MENUS = (
    verify_most(20),
    verify_most(6),
    verify_most(0),
    VerifyMenu((2, 8, 20), (10.0, 11.0, 14.0), growth_ms=0.3, scale=0.9, extra=(0.0, 0.5, 1.0)),
)
PENALTIES = ProcessorConfig(
    logit_bias=((7, 2.5), (20, -4.0), (33, float("-inf"))),
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.7,
    no_repeat_ngram_size=3,
    banned=((14,), (21, 28), (5, 12, 19)),
    min_tokens=3,
    ends=(0, 100),
)
WORDS = GrammarConfig(kind="regex", source=r"( (the|a|red|old) (fox|dog|owl)){1,4}\.")
FORCED = GrammarConfig.of("json", {"properties": {"fox": {"enum": [1, "red"]}}, "required": ["fox"]})
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, seed=3),
    SamplingConfig(temperature=1.2, top_k=20, top_p=0.9, seed=2**62),
    SamplingConfig(temperature=0.6, min_p=0.05, seed=9),
    SamplingConfig(processors=PENALTIES),
    SamplingConfig(top_k=3, processors=replace(PENALTIES, repetition_penalty=1.0, no_repeat_ngram_size=1)),
    SamplingConfig(temperature=0.9, top_p=0.8, seed=4, processors=PENALTIES),
    SamplingConfig(temperature=1.1, seed=8, processors=ProcessorConfig(min_tokens=5, ends=(1, 17, 250))),
    SamplingConfig(processors=ProcessorConfig(grammar=WORDS)),
    SamplingConfig(temperature=0.9, top_p=0.8, seed=4, processors=ProcessorConfig(grammar=WORDS)),
    SamplingConfig(temperature=0.7, seed=6, processors=replace(PENALTIES, grammar=FORCED)),
    SamplingConfig(processors=replace(PENALTIES, grammar=FORCED)),
)


@dataclass
class Stand:
    """Graphs over a page table whose rows own pages in a shuffled order."""

    pair: LoadedPair

    def __post_init__(self) -> None:
        batcher = load_batcher(self.pair.bundle, ServeConfig(policy="off", gamma_max=4, max_batch=8))
        self.target = batcher.target
        self.draft = batcher.draft
        self.grammars = batcher.grammars
        self.acceptance = batcher.acceptance
        table_BP = batcher.pool.table_BP
        order = torch.randperm(batcher.pool.num_pages, generator=torch.Generator().manual_seed(5))
        self.num_pages = batcher.pool.num_pages // ROWS
        for row in range(ROWS):
            pages = order[row * self.num_pages : (row + 1) * self.num_pages][: table_BP.shape[1]]
            table_BP[row, : len(pages)] = pages

    def grammar(self, sampling: SamplingConfig) -> GrammarState | None:
        return grammar_of(self.grammars, GenerateConfig(sampling=sampling))

    def choice(self, rows: Sequence[Row], shapes: Sequence[Shape], menu: VerifyMenu) -> Choice:
        calibrations = [self.acceptance(row.state.sampling.temperature).calibration for row in rows]
        return Choice(tuple(shapes), tuple(calibrations), menu)

    def stored(self, rows: Sequence[Row]) -> list[Tensor]:
        """The committed KV of every row in both models."""
        found = []
        for model, lens in (
            (self.target, [row.target_len for row in rows]),
            (self.draft, [row.draft_len for row in rows]),
        ):
            for row, length in zip(rows, lens, strict=True):
                pages = model.cache.pages_BP[row.row, : self.num_pages].long()
                slots = by_slot(model.cache.storage_PL2GSF[pages]).permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
                found.append(slots[:length])
        return found


@pytest.fixture(scope="module")
def stand(tiny: LoadedPair) -> Stand:
    return Stand(tiny)


def record(result: StepResult) -> tuple[Any, ...]:
    """Everything in a result except its time; sums differ in the last bits."""
    tree = result.tree
    arrays = [array.tolist() for array in (tree.token_N, tree.parent_N, tree.depth_N, tree.path_NA)]
    values = [round(value, 12) for value in result.values]
    assert list(result.depths) == arrays[2]
    bare = replace(
        result,
        ms=0.0,
        parts=None,
        values=(),
        depths=(),
        predicted_emitted=0.0,
        tree_of=len,
        inspection=None,
    )
    seen = inspected(result)
    return bare, arrays, tree.log_prob_N.tolist(), values, round(result.predicted_emitted, 12), seen


def inspected(result: StepResult) -> tuple[list[Any], list[int], list[int]] | None:
    """The drafted tree, the verified nodes in it and the target's tokens."""
    found = result.inspection
    if found is None:
        return None
    tree = found.tree
    arrays = [array.tolist() for array in (tree.token_N, tree.parent_N, tree.log_prob_N, tree.path_NA)]
    return arrays, list(found.kept), list(found.target_tokens)


HISTORIES = st.fixed_dictionaries(
    {
        "prompts": st.lists(
            st.tuples(
                st.integers(1, 40),
                st.integers(0, 300),
                st.sampled_from((1, 3, 8, 40)),
                st.sampled_from(SAMPLINGS),
            ),
            min_size=1,
            max_size=ROWS,
        ),
        "steps": st.lists(
            st.tuples(
                st.lists(st.sampled_from(SHAPES), min_size=ROWS, max_size=ROWS),
                st.sampled_from(MENUS),
                st.integers(0, 12),  # prompt tokens of a row whose root is not reached
            ),
            min_size=1,
            max_size=5,
        ),
    }
)


def run(stand: Stand, form: Any, history: dict[str, Any]) -> tuple[list[Any], list[Tensor], list[int]]:
    """The results of every step, the KV at the end, and the number of tokens of every verification.

    Rows join with their prompts: the first one decodes from the start, the others join one a step. The last
    row of the table runs a prompt.
    """
    step = form(stand.target, stand.draft, Trace())
    states = [
        DecodeState(
            [(start + 7 * (index % period)) % 300 for index in range(length)],
            sampling,
            grammar=stand.grammar(sampling),
            inspect=place % 2 == 0,
        )
        for place, (length, start, period, sampling) in enumerate(history["prompts"])
    ]
    waiting = [Row(place, state) for place, state in enumerate(states)]
    decoding: list[Row] = []
    records = []
    nums_tokens = []
    prompted = 0
    for shapes, menu, most_prompt in history["steps"]:
        nums_tokens.append(step.draft(decoding, stand.choice(decoding, shapes[: len(decoding)], menu)))
        joining = (
            [waiting.pop(0)] if waiting and len(waiting[0].state.tokens) + nums_tokens[-1] < 32 else []
        )
        used = nums_tokens[-1] + sum(len(row.state.tokens) for row in joining)
        num_prompt = min(most_prompt, 32 - used) if len(states) < ROWS else 0
        tokens = [5 + place for place in range(prompted, prompted + num_prompt)]
        prompts = [Chunk(ROWS - 1, tokens, prompted, 0)] if num_prompt else []
        results = step.verify(joining, prompts)
        prompted += num_prompt
        decoding += joining
        for place, result in enumerate(results):
            logits_NV = step.logits(place, result.path)
            records.append((record(result), logits_NV.argmax(-1).tolist()))
            if decoding[place].state.sampling == SamplingConfig():
                assert records[-1][1] == result.tokens
    return records, stand.stored(decoding), nums_tokens


def test_uncaptured_graphs_of_a_device_do_not_run_in_c(stand: Stand) -> None:
    """They are loaded like those of a CPU, but the C++ step reads and writes on the host."""
    assert NativeStep.runs(stand.target, stand.draft)
    on_device = copy(stand.target)
    on_device.device = "cuda"
    assert not NativeStep.runs(on_device, stand.draft)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(HISTORIES)
def test_both_forms_of_the_step_over_rows_are_equal(stand: Stand, history: dict[str, Any]) -> None:
    reference, kv, nums_tokens = run(stand, StepOverRows, history)
    records, native_kv, native_nums_tokens = run(stand, NativeStep, history)
    assert native_nums_tokens == nums_tokens
    assert records == reference
    assert all(torch.equal(*pair) for pair in zip(native_kv, kv, strict=True))


AHEAD = [
    plan
    for plan in plans()
    if plan.name in ("tail side, next_head side, noise side", "tail early, next_head main, noise late")
]


@pytest.mark.parametrize("plan", AHEAD, ids=lambda plan: plan.name)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=HISTORIES)
def test_a_plan_over_rows_equals_the_sequential_one(
    stand: Stand, plan: Plan, history: dict[str, Any]
) -> None:
    """Rows join while the tail on "side" still runs. A plan commits more of the draft's KV."""

    def slow_tails(*args: Any) -> list[RowDraft]:
        drafts = run_tails(*args)
        time.sleep(0.003)
        return drafts

    reference, kv, nums_tokens = run(stand, StepOverRows, history)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows_module, "run_tails", slow_tails)
        records, planned_kv, planned_nums_tokens = run(stand, partial(StepOverRows, plan=plan), history)
    assert planned_nums_tokens == nums_tokens
    assert records == reference
    for theirs, ours in zip(kv, planned_kv, strict=True):
        assert len(theirs) <= len(ours)
        assert torch.equal(theirs, ours[: len(theirs)])
