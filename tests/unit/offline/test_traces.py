"""Calibration in batches equals calibration one by one, and keeps to its budget."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import tiny_pair
import torch
from torch import Tensor

from bench.lib.one_by_one import collect_one_by_one
from yggdrasil.config import GenerateConfig
from yggdrasil.errors import ConfigError
from yggdrasil.layout import INDEX
from yggdrasil.models.packing import empty_meta
from yggdrasil.offline import budget, tuning
from yggdrasil.offline.budget import (
    FEWEST_LEVELS,
    FEWEST_ROOTS,
    FEWEST_TEXTS,
    CalibrationSize,
    PassClock,
    largest_within,
    seconds_of,
)
from yggdrasil.offline.traces import PASSAGES, PROMPT_LEN, Passage, beginnings, further_passages, read_texts
from yggdrasil.offline.tuning import CALIBRATION_TEMPERATURES, calibrate, collect, train_depth
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.depth import DepthPredictor
from yggdrasil.policy.shape import DepthRule
from yggdrasil.state import Shape

WHOLE = CalibrationSize(
    num_texts=64, num_passages=320, num_tokens=20, max_depth=16, widths=(1, 2, 4, 8), reference_width=4
)


@pytest.fixture(scope="module")
def prompts(tiny: LoadedPair) -> list[list[int]]:
    return beginnings(tiny_pair.stories(5, seed=7), tiny.tokenizer, "")


@pytest.fixture(scope="module")
def further(prompts: list[list[int]]) -> list[Passage]:
    return [Passage(text, prompts[text][:9]) for text in (0, 2, 3, 0, 1, 4)]


def test_batches_collect_what_one_text_and_one_tree_at_a_time_collect(
    tiny: LoadedPair, prompts: list[list[int]], further: list[Passage]
) -> None:
    size = CalibrationSize(
        num_texts=5,
        num_passages=11,
        num_tokens=tiny.bundle.config.calibration_tokens,
        max_depth=4,
        widths=(1, 4),
        reference_width=4,
    )
    found = collect(
        tiny.bundle, (tiny.engine.target, tiny.engine.draft), prompts, further, tiny_pair.SilentProgress()
    )
    for temperature, traces in zip(CALIBRATION_TEMPERATURES, found, strict=True):
        expected = collect_one_by_one(tiny.engine, prompts, further, temperature, size, Shape(4, 3, 8))
        assert traces.platt == expected.platt
        assert traces.deep == expected.deep
        assert traces.others == expected.others
        assert traces.text_N.tolist() == expected.text_N.tolist()
        assert traces.root_N.tolist() == expected.root_N.tolist()
        assert traces.hidden_NE.tolist() == expected.hidden_NE.tolist()
        for part in ("hidden_NE", "root_N", "text_N", "length_N"):
            assert getattr(traces.forced, part).tolist() == getattr(expected.forced, part).tolist()
        assert len(traces.forced.length_N) == 11 * size.num_tokens
        assert any(any(record.accepted[1:]) for record in traces.deep), (
            "a text that no tree follows proves little"
        )


def test_progress_of_calibration_reaches_exactly_its_total(
    tiny: LoadedPair, prompts: list[list[int]], further: list[Passage]
) -> None:
    progress = tiny_pair.CountedProgress()
    collect(tiny.bundle, (tiny.engine.target, tiny.engine.draft), prompts, further, progress)
    assert {"write texts", "draft trees"} < set(progress.totals)
    for name in ("write texts", "draft trees"):
        assert progress.done[name] == progress.totals[name] > 0


def test_a_tight_budget_leaves_fewer_passages_and_trees(
    tiny: LoadedPair, prompts: list[list[int]], further: list[Passage]
) -> None:
    config = replace(tiny.bundle.config, calibration_budget_s=1e-9)
    cheap = collect(
        replace(tiny.bundle, config=config),
        (tiny.engine.target, tiny.engine.draft),
        prompts,
        further,
        tiny_pair.SilentProgress(),
    )
    whole = collect(
        tiny.bundle, (tiny.engine.target, tiny.engine.draft), prompts, further, tiny_pair.SilentProgress()
    )
    for few, many in zip(cheap, whole, strict=True):
        assert len(few.deep) == FEWEST_ROOTS * len(prompts) < len(many.deep)
        assert len(few.hidden_NE) == len(few.text_N) == len(few.deep)
        assert len(few.forced.text_N) == len(few.forced.length_N) == 5 * len(many.forced.length_N) // 11


def test_the_policy_grows_no_tree_deeper_than_calibrated_ones(
    tiny: LoadedPair, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FEWEST_LEVELS", 2)
    monkeypatch.setattr(tuning, "largest_within", lambda whole, *_: [*whole.smaller()][-1])
    bundle = tiny.bundle
    progress = tiny_pair.SilentProgress()
    traces = collect(bundle, (tiny.engine.target, tiny.engine.draft), prompts, [], progress)
    acceptance = calibrate(traces, progress)
    assert acceptance.nearest(0.0).max_depth == 2 < bundle.config.max_depth
    trained, _ = train_depth(bundle, tiny.engine, prompts[0], traces, acceptance, tiny.latency, progress)
    depth = replace(tiny.depth, predictor=DepthPredictor.from_bytes(trained))
    assert depth.predictor.max_depth == 2
    shallow = replace(tiny, acceptance=acceptance, depth=depth)
    config = GenerateConfig(max_new_tokens=24)
    for rule in get_args(DepthRule):
        policy = shallow.policy(depth=rule, guard=False)
        depths = [step.shape.depth for step in tiny.engine.generate(prompts[0], policy, config)]
        assert 1 <= max(depths) <= 2


def test_sizes_fall_from_the_whole_to_the_smallest_useful_one() -> None:
    sizes = list(WHOLE.smaller())
    assert sizes[0] == WHOLE
    assert sizes[-1].num_texts == FEWEST_TEXTS
    assert sizes[-1].num_roots == FEWEST_TEXTS * FEWEST_ROOTS
    assert sizes[-1].max_depth == FEWEST_LEVELS
    for more, fewer in pairwise(sizes):
        assert fewer != more
        assert fewer.max_depth <= more.max_depth
        assert fewer.num_roots <= more.num_roots
        assert fewer.num_passages <= more.num_passages
        assert fewer.num_passages >= fewer.num_texts
        assert fewer.num_tree_tokens <= more.num_tree_tokens


def test_roots_stand_all_along_the_texts_where_each_has_few() -> None:
    *_, smallest = WHOLE.smaller()
    seen = {end for text in range(smallest.num_texts) for end in smallest.root_ends(text, 0)}
    assert seen == set(range(0, WHOLE.num_tokens, 2))


def test_tokens_of_calibration_trees_equal_a_count_by_hand() -> None:
    size = CalibrationSize(
        num_texts=1, num_passages=1, num_tokens=10, max_depth=3, widths=(1, 2, 4), reference_width=2
    )
    assert list(size.root_ends(0, 7)) == [7, 9, 11, 13, 15]
    # five chains of two levels that are run; two of the roots have the other widths
    assert size.num_tree_tokens == 5 * 2 * 2 + 2 * (1 + 4) * 2


class Timed:
    """A model whose forward takes a second a hundred tokens, and the first of every graph ten more."""

    device = "cpu"
    max_depth = 3
    prefill_chunk = 8
    sizes = (2, 8)

    def __init__(self) -> None:
        self.now = 0.0
        self.rows_seen: list[int] = []
        self._known: set[int] = set()

    def meta(self, num_tokens: int) -> Tensor:
        return empty_meta(2 if num_tokens <= 2 else 8, self.max_depth)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        self.rows_seen.append(int((meta_NM[:, INDEX] >= 0).sum()))
        self.now += len(meta_NM) / 100 + (0 if len(meta_NM) in self._known else 10)
        self._known.add(len(meta_NM))
        return torch.zeros(len(meta_NM), 1), torch.zeros(len(meta_NM), 1)


@pytest.mark.usefixtures("kernels")
def test_a_pass_is_timed_once_its_weights_are_in_memory() -> None:
    model = Timed()
    clock = PassClock(model, num_rows=3, now=lambda: model.now)  # type: ignore[arg-type]
    assert clock(17) == pytest.approx(2 * 0.08 + 0.02)
    assert max(model.rows_seen) == 3, "rows that the page table does not have were written"
    passes = len(model.rows_seen)
    assert clock(8) == pytest.approx(0.08)
    assert len(model.rows_seen) == passes


@pytest.mark.usefixtures("kernels")
def test_seconds_of_a_calibration_equal_a_sum_by_hand() -> None:
    target = Timed()
    draft = Timed()
    clocks = [PassClock(model, num_rows=2, now=lambda model=model: model.now) for model in (target, draft)]
    size = CalibrationSize(
        num_texts=2, num_passages=2, num_tokens=4, max_depth=3, widths=(1, 2), reference_width=2
    )
    # prompts of 12 tokens in two chunks, 7 tokens of four texts, two at a time
    writing = 0.16 + 7 * 2 * 0.02
    texts = 2 * 3 * 0.08  # 6 + 14 tokens at each of two temperatures: two chunks, and the rest in a third
    # four trees of width two and one of width one, two levels run of each, four nodes a forward
    trees = 2 * (4 * 2 + 1) * 2 / 4 * 0.08
    found = seconds_of(size, [3, 3], (0.0, 1.0), clocks[0], clocks[1], target_rows=2, sampling_s=0.5)
    assert found == pytest.approx(writing + texts + trees + 7 * 2 * 0.5), (
        "every token of the sampled texts costs its noise, too"
    )


def test_the_budget_is_kept_where_it_can_be() -> None:
    def seconds(size: CalibrationSize) -> float:
        return size.num_tree_tokens / 100

    chosen = largest_within(WHOLE, seconds, 100.0)
    assert seconds(chosen) <= 100.0 < seconds(WHOLE)
    assert chosen.num_passages == chosen.num_texts
    alone = replace(WHOLE, num_passages=WHOLE.num_texts)
    assert largest_within(WHOLE, lambda size: size.num_passages, WHOLE.num_texts) == alone
    assert largest_within(WHOLE, seconds, 1e9) == WHOLE
    assert largest_within(WHOLE, seconds, 1e-9).num_texts == FEWEST_TEXTS


def test_trees_get_shallower_only_where_that_keeps_the_budget() -> None:
    def seconds(size: CalibrationSize) -> float:
        return 50.0 + size.num_tree_tokens / 100

    *_, smallest = WHOLE.smaller()
    shallow = largest_within(WHOLE, seconds, 60.0)
    assert smallest.max_depth < shallow.max_depth < WHOLE.max_depth
    assert seconds(shallow) <= 60.0
    assert largest_within(WHOLE, seconds, 55.0) == replace(smallest, max_depth=WHOLE.max_depth)


def test_passages_take_a_tenth_of_the_budget_however_large_it_is() -> None:
    most = WHOLE.num_texts + 40
    chosen = largest_within(WHOLE, lambda size: size.num_passages, 400.0)
    assert most - FEWEST_TEXTS < chosen.num_passages <= most
    assert chosen.num_texts == WHOLE.num_texts


def test_further_passages_are_spread_over_the_texts_that_are_long_enough(tiny: LoadedPair) -> None:
    long = "the cat sat on the mat. " * 60
    short = "the cat"
    tokens = tiny.tokenizer.encode(long)
    found = further_passages([short, long], tiny.tokenizer)
    assert [passage.text for passage in found] == [1] * (PASSAGES - 1)
    starts = [place * len(tokens) // PASSAGES for place in range(1, PASSAGES)]
    assert [passage.tokens for passage in found] == [tokens[at : at + PROMPT_LEN] for at in starts]
    assert min(starts[0], *(later - earlier for earlier, later in pairwise(starts))) >= PROMPT_LEN


def test_a_text_that_has_no_token_left_gives_no_passage(tiny: LoadedPair) -> None:
    texts = ["", "the cat sat on the mat. " * 60]
    assert {passage.text for passage in further_passages(texts, tiny.tokenizer)} == {0}, (
        "places are those of `beginnings`, which leaves out the first text"
    )


@pytest.mark.parametrize(
    "line",
    (
        b'{"text": 3}',
        b'{"text": null}',
        b'{"txt": "a"}',
        b"[1]",
        b"{",
        b'{"text": "\\ud800"}',
        b"[" * 10**5,
    ),
    ids=lambda line: repr(line[:20]),
)
def test_a_line_without_a_text_is_refused_by_its_number(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"text": "One day"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match='calibration: .* a "text" in every line; line 3: '):
        read_texts(path)


def test_texts_may_have_any_line_end_and_the_mark_of_windows(tmp_path: Path) -> None:
    texts = ["One\u2028day\x85", "The\x0csun\x1c", "Zoë"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "texts.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert read_texts(tmp_path / "texts.jsonl") == texts
    (tmp_path / "texts.txt").write_bytes("\r\n\r\n".join(texts).encode("utf-8-sig"))
    assert read_texts(tmp_path / "texts.txt") == texts
