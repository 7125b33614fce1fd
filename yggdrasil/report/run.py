"""One generation, timed and counted: what `pair.stream` returns, and `--json` and `--stats` print."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

from yggdrasil.config import GenerateConfig
from yggdrasil.kernels.compilations import compilations, no_compilation
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.objective import speedup
from yggdrasil.state import PLAIN, StepResult
from yggdrasil.text.tokenizer import TextStream

__all__ = ["Chunk", "Result", "Run"]

SHOWN_CHARS = 60
ENOUGH_STEPS = 8  # for a median that one or two slow steps do not change


@dataclass(frozen=True, repr=False)
class Result:
    """A finished text. `print(result)` prints it.

    Args:
        text: The text after the prompt.
        tokens: Its tokens, with the end-of-text token if that ended it.
        finish_reason: "stop" after an end-of-text token or a stop text, "length" at a limit.
        prompt_tokens: Number of tokens of the prompt.
        target_passes: Forward passes of the target that emitted tokens.
        ttft_ms: Until the first token.
        total_ms: Until the last token.
        tok_per_s: Tokens per second after the first pass; 0 if there was only one.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    target_passes: int
    ttft_ms: float
    total_ms: float
    tok_per_s: float

    @property
    def aal(self) -> float:
        """Mean emitted tokens per target forward."""
        return len(self.tokens) / max(1, self.target_passes)

    @property
    def figures(self) -> str:
        """Tokens, tokens per second, and tokens per pass of the target, for a person."""
        speed = f"{self.tok_per_s:.0f} tokens/s, " if self.tok_per_s else ""
        return f"{len(self.tokens)} tokens, {speed}{self.aal:.2f} tokens a pass"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Result({_shortened(self.text)}, {self.figures}, finish_reason={self.finish_reason!r})"


class Chunk(NamedTuple):
    """The text of a step.

    Args:
        ms: When it came, from the beginning of the run.
        accepted: Accepted draft tokens in it.
    """

    ms: float
    text: str
    accepted: int


class Run:
    """One generation, which decodes while it is read.

    Iterating over it, with `for` or `async for`, gives the text in whole characters, a step at a time. With
    `async for` the steps run in a thread, so the event loop goes on.

    Args:
        start: `time.perf_counter()` when the user started the command.
        policy: Chooses shapes; by default the pair's best policy, or plain decoding if requested.
        guard: Whether that policy has a guard.
        keep: Compute the prompt only from where it differs from the last text of the engine, if the pair's
            graphs have equal bits.

    Attributes:
        kept_tokens: Tokens of the prompt that were not computed again.
        results: The steps so far.
        chunks: Their texts, and at the end the text that was held back.
        text: The text so far; text that a stop text could still take back is not part of it.
    """

    def __init__(
        self,
        pair: LoadedPair,
        prompt: Sequence[int],
        config: GenerateConfig,
        *,
        start: float | None = None,
        policy: Any = None,
        guard: bool = True,
        keep: bool = False,
    ) -> None:
        self.pair = pair
        self.prompt = prompt
        self.config = config
        self.policy = policy or pair.policy(
            temperature=config.sampling.temperature,
            shape=PLAIN if config.plain else None,
            guard=guard,
            draft=config.draft,
        )
        self.results: list[StepResult] = []
        self.chunks: list[Chunk] = []
        self.finish_reason = "length"
        self.kept_tokens = 0
        self._keep = keep and not pair.bundle.inexact_widths
        self._stream = TextStream(pair.tokenizer, config.stop, prompt)
        self._steps = self._decode()
        now = time.perf_counter()
        self.startup_ms = (now - (now if start is None else start)) * 1e3
        self.ttft_ms = 0.0
        self.total_ms = 0.0

    def steps(self) -> Iterator[tuple[str, StepResult | None]]:
        """The text of every step, with the step; at the end the text held back, with None.

        Text after a stop text is not part of the answer.
        """
        return self._steps

    def __iter__(self) -> Iterator[str]:
        return (text for text, _ in self._steps if text)

    async def __aiter__(self) -> AsyncIterator[str]:
        chunks = iter(self)
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1)  # one thread, because a step's operators expect their own
        try:
            while True:
                step = loop.run_in_executor(thread, next, chunks, "")
                if (chunk := await _whole(step)) == "":
                    return
                yield chunk
        finally:
            thread.shutdown(wait=False)  # the loop goes on

    def complete(self) -> Run:
        """Run to the end without streaming."""
        for _ in self._steps:
            pass
        return self

    def close(self) -> None:
        """End before the end of the text; what was written so far remains."""
        self._steps.close()

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def result(self) -> Result:
        """The text and the figures so far."""
        return Result(
            self.text,
            tuple(self.tokens),
            self.finish_reason,
            len(self.prompt),
            len(self.results),
            self.ttft_ms,
            self.total_ms,
            self.tok_per_s,
        )

    def __repr__(self) -> str:
        return f"Run({_shortened(self.text)}, {self.result.figures})"

    def _decode(self) -> Generator[tuple[str, StepResult | None]]:
        engine = self.pair.engine
        self._before = dict(engine.trace.total_ms), engine.draft.graph_ms, engine.target.graph_ms
        start = time.perf_counter()
        steps = engine.generate(self.prompt, self.policy, self.config, keep=self._keep)
        while (result := _next_step(steps)) is not None:
            self.kept_tokens = engine.kept_len
            self._enter(result, (time.perf_counter() - start) * 1e3)
            text = self._stream.push(result.tokens)
            self.chunks.append(Chunk(self.total_ms, text, result.accepted))
            left = time.perf_counter()
            yield text, result
            start += time.perf_counter() - left  # a reader's time is not the run's
        self.finish_reason = "stop" if self._stream.stopped or self._ended() else "length"
        rest = self._stream.finish()
        self.chunks.append(Chunk(self.total_ms, rest, 0))
        yield rest, None

    def _enter(self, result: StepResult, now_ms: float) -> None:
        if not self.results:
            self.ttft_ms = now_ms
        self.total_ms = now_ms
        self.results.append(result)

    def _ended(self) -> bool:
        ends = self.config.ends(self.pair.engine.eos_tokens)
        return bool(self.results) and self.results[-1].tokens[-1] in ends

    @property
    def tokens(self) -> list[int]:
        return [token for result in self.results for token in result.tokens]

    @property
    def num_tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)

    @property
    def aal(self) -> float:
        """Mean emitted tokens per target forward that emits any; the first ends the prompt."""
        return self.num_tokens / max(1, len(self.results))

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first step."""
        later = self.num_tokens - len(self.results[0].tokens) if self.results else 0
        return (self.total_ms - self.ttft_ms) / later if later else 0.0

    @property
    def tok_per_s(self) -> float:
        """Tokens per second after the first step; 0 if there was only one."""
        return 1e3 / self.tpot_ms if self.tpot_ms else 0.0

    @property
    def slowdown(self) -> float | None:
        """Median of measured over predicted milliseconds of a step; None after too few steps."""
        latency = self.pair.latency
        ratios = [
            result.ms
            / latency.step_ms(result.shape.width, result.shape.depth, result.verified, result.context_len)
            for result in self.results
            if not result.caught_up
        ]
        return median(ratios) if len(ratios) >= ENOUGH_STEPS else None

    @property
    def _predicted_speedup(self) -> float:
        """Mean of Eq. 3 over the steps; 0 without any."""
        latency = self.pair.latency
        predicted = [
            speedup(
                result.predicted_emitted,
                width=result.shape.width,
                depth=result.shape.depth,
                verify=result.verified,
                context_len=result.context_len,
                latency=latency,
            )
            for result in self.results
        ]
        return mean(predicted) if predicted else 0.0

    def to_json(self) -> dict[str, Any]:
        """All figures of the run, with units in the keys."""
        engine = self.pair.engine
        bundle = self.pair.bundle
        stages, in_draft, in_target = self._before
        shapes = Counter(str(result.shape) for result in self.results)
        accepted = Counter(result.accepted for result in self.results)
        rejected = sum(result.verified - 1 - result.accepted for result in self.results)
        kv = bundle.kv_target
        return {
            "text": self.text,
            "token_ids": self.tokens,
            "num_tokens": self.num_tokens,
            "prompt_tokens": len(self.prompt),
            "finish_reason": self.finish_reason,
            "target_passes": len(self.results),
            "aal": self.aal,
            "accepted_histogram": {str(count): accepted[count] for count in sorted(accepted)},
            "startup_ms": self.startup_ms,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tok_per_s": self.tok_per_s,
            "predicted_speedup": self._predicted_speedup,
            "slowdown": self.slowdown,
            "compilations": compilations(),
            "stages_ms": {
                name: total - stages.get(name, 0.0) for name, total in engine.trace.total_ms.items()
            },
            "graphs_ms": {
                "draft": engine.draft.graph_ms - in_draft,
                "target": engine.target.graph_ms - in_target,
            },
            "speculation": "off" if self.config.plain else dict(shapes.most_common()),
            "guard": any(result.is_guarded for result in self.results),
            "rollback_tokens": rejected,
            "rejected_kv_bytes": rejected
            * kv.num_layers
            * 2
            * kv.num_kv_heads
            * kv.head_dim
            * (2 if bundle.config.dtype == "bfloat16" else 4),
            "seed": self.config.sampling.seed,
            "temperature": self.config.sampling.temperature,
            "pair": bundle.name,
            "device": bundle.config.device,
            "ranks": bundle.config.ranks,
            "dtype": bundle.config.dtype,
        }

    def summary(self) -> str:
        """A few lines for a person."""
        report = self.to_json()
        per_step = {
            name: total / max(1, len(self.results))
            for name, total in report["stages_ms"].items()
            if name != "prefill"
        }
        stages = "  ".join(f"{name} {value:.2f}" for name, value in per_step.items())
        guard = "" if self.config.plain or report["guard"] else ", without a guard"
        return (
            f"{report['num_tokens']} tokens in {report['target_passes']} target passes: "
            f"{report['aal']:.2f} tokens per pass\n"
            f"first token after {report['ttft_ms']:.0f} ms, then {report['tpot_ms']:.2f} ms per token "
            f"({report['tok_per_s']:.0f} tokens/s)\n"
            f"speedup over plain decoding that the profile predicts: {report['predicted_speedup']:.2f}; "
            "to measure it, run again with --plain\n"
            f"ms per step: {stages}\n"
            f"shapes: {report['speculation']}{guard}"
        )


def _next_step(steps: Iterator[StepResult]) -> StepResult | None:
    """The next step; None at the end. A program may compile another pair between two steps."""
    with no_compilation():
        return next(steps, None)


async def _whole(step: asyncio.Future[str]) -> str:
    """The text of a step. If its reader is cancelled, it first ends, as no thread can be stopped within."""
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        await asyncio.wait((step,))
        raise


def _shortened(text: str) -> str:
    """The beginning of a text, quoted, for a `repr`."""
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")
