"""Recording of steps: when each graph of a model ran, and when each stage of the engine began and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError
from yggdrasil.models.protocol import TokenModel
from yggdrasil.pair import LoadedPair
from yggdrasil.report.timeline import Interval, StepRecord, Timeline
from yggdrasil.trace import Trace

__all__ = ["Forward", "Note", "RecordedModel", "Recorder", "record_timeline"]

Note = Callable[[], Iterable["Forward"]]
"""Reads the forwards of a step after it, so that the step's time has none of that work."""
GREEDY = SamplingConfig()
NUM_STEPS = 24
MOST_RUNS = 6
WARM_UP = 2  # steps of every run that are dropped: the first contains the prompt's forwards


class Forward(NamedTuple):
    """A forward, stored as it ran; the work of naming it is left for later.

    Args:
        kind: Kind of the graph, "draft" or "verify".
        sizes: Sizes of the menu, if `num_tokens` may have been padded to one of them.
    """

    kind: str
    num_tokens: int
    begin_ms: float
    end_ms: float
    sizes: Sequence[int] = ()

    @property
    def interval(self) -> Interval:
        """Its time, named by kind and tokens of the graph."""
        size = next((size for size in self.sizes if size >= self.num_tokens), self.num_tokens)
        return Interval(f"{self.kind} {size}", self.begin_ms, self.end_ms, True)


class Recorder(Trace):
    """A trace that keeps the times of stages and graphs until `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[tuple[Sequence[str], Sequence[float]]] = []
        self.graphs: list[Note] = []

    def note(self, names: Sequence[str], marks_ms: Sequence[float]) -> None:
        """Keep the times of stages in a row."""
        self.stages.append((names, marks_ms))

    def take(self, shape: str, start_ms: float, end_ms: float) -> StepRecord:
        """The step since the last call."""
        stages = (
            Interval(name, *marks)
            for names, marks_ms in self.stages
            for name, marks in zip(names, pairwise(marks_ms), strict=True)
        )
        graphs = (forward.interval for note in self.graphs for forward in note())
        step = StepRecord(
            shape, start_ms, end_ms, tuple(stages), tuple(sorted(graphs, key=lambda each: each.when))
        )
        self.stages.clear()
        self.graphs.clear()
        return step


class RecordedModel:
    """A model that records when its graphs run; see models/protocol.py.

    Args:
        kind: Kind of its graphs, for their names.
        notes: List that receives the forwards.

    Cost: a microsecond per forward of Python, or per step of C++; on CUDA also a sync, since a forward only
    launches its kernels.
    """

    def __init__(self, model: TokenModel, kind: str, notes: list[Note]) -> None:
        self.cache = model.cache
        self.device = model.device
        self.max_depth = model.max_depth
        self.sizes = model.sizes
        self.prefill_chunk = model.prefill_chunk
        self.widest = model.widest
        self.num_candidates = model.num_candidates
        self.vocab = model.vocab
        self.graph_ms = 0.0
        self._model = model
        self._kind = kind
        self._notes = notes

    def meta(self, num_tokens: int) -> Tensor:
        return self._model.meta(num_tokens)

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        outputs = self._model.forward(meta_NM)
        if self.device == "cuda":
            torch.cuda.synchronize()  # sync: a graph has run when its result has arrived
        end = time.perf_counter()
        self.graph_ms += (end - start) * 1e3
        self._notes.append(partial(iter, (Forward(self._kind, len(meta_NM), start * 1e3, end * 1e3),)))
        return outputs

    def graph_object(self, meta_NM: Tensor) -> Any | None:
        return self._model.graph_object(meta_NM)

    def record_forwards_(self, ms: float, each: Callable[[], Iterable[tuple[int, float, float]]]) -> None:
        self.graph_ms += ms
        self._notes.append(partial(self._read, each))

    def _read(self, each: Callable[[], Iterable[tuple[int, float, float]]]) -> Iterator[Forward]:
        for num_tokens, begin_ms, end_ms in each():
            yield Forward(self._kind, num_tokens, begin_ms, end_ms, self.sizes)


def record_timeline(
    pair: LoadedPair,
    prompt: Sequence[int],
    *,
    num_steps: int = NUM_STEPS,
    sampling: SamplingConfig = GREEDY,
) -> Timeline:
    """Decode a prompt with the default policy, without a plan, until `num_steps` steps were alike.

    There is no guard: on a busy machine it stops speculation, and a plain step has no draft to show.

    Args:
        pair: Its caches are overwritten.
        prompt: At least one token; decoded up to `MOST_RUNS` times if one text has too few steps of a kind.
        num_steps: Steps of one kind to find; fewer are returned if there are no more.

    Raises:
        ConfigError: the context has no room for a step after the warm-up.
    """
    steps: list[StepRecord] = []
    for _ in range(MOST_RUNS):
        steps += _run(pair, prompt, WARM_UP + num_steps, sampling)[WARM_UP:]
        if not steps:
            raise ConfigError(
                "prompt",
                f"{len(prompt)} tokens",
                f"at most {pair.bundle.max_context // 2}, to have steps after it",
            )
        found = Timeline.of(steps)
        if len(found.steps) >= num_steps:
            break
    return found


def _run(
    pair: LoadedPair, prompt: Sequence[int], num_steps: int, sampling: SamplingConfig
) -> list[StepRecord]:
    recorder = Recorder()
    steps = []
    target = RecordedModel(pair.engine.target, "verify", recorder.graphs)
    draft = RecordedModel(pair.engine.draft, "draft", recorder.graphs)
    engine = Engine(target, draft, max_context=pair.bundle.max_context, trace=recorder)
    start = time.perf_counter()
    policy = pair.policy(temperature=sampling.temperature, guard=False)
    config = GenerateConfig(ignore_eos=True, sampling=sampling)
    for result in islice(engine.generate(prompt, policy, config), num_steps):
        end = time.perf_counter()
        steps.append(recorder.take(str(result.shape), start * 1e3, end * 1e3))
        start = time.perf_counter()
    return steps
