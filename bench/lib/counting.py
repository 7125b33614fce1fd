"""Count what a structure accepts, and evaluate it by Eq. 3: no clock, so that many structures can be
compared and tuned.

Tokens are counted on the small pair that computes the scaled pair's function; milliseconds are those of the
scaled pair's profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.harness import TextMismatchError
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import dynamic_sequence, k_ary, opt_tree, sequence, structure_ms
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import FixedShape, ShapePolicy
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.state import Shape, StepResult

__all__ = ["Count", "Counter", "candidates"]

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
BRANCHES = (2, 3, 4)
MIN_GAINS = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Count:
    """What a policy did on some prompts. A step that ends a prompt without a draft is not counted.

    Args:
        tokens: Emitted.
        passes: Target forwards.
        ms: Of all steps, by the profile.
        plain_ms: Of the same tokens decoded plainly, by the profile.
    """

    tokens: int
    passes: int
    ms: float
    plain_ms: float

    @property
    def aal(self) -> float:
        """Emitted tokens per target forward."""
        return self.tokens / self.passes

    @property
    def speedup(self) -> float:
        """Eq. 3."""
        return self.plain_ms / self.ms

    def to_json(self) -> dict[str, Any]:
        return {
            "aal": round(self.aal, 3),
            "speedup_eq3": round(self.speedup, 3),
            "tokens": self.tokens,
            "passes": self.passes,
        }


class Counter:
    """Runs structures over prompts; every text must equal plain decoding's.

    Args:
        twin: The pair that decodes.
        latency: The profile with the times of its steps.
        num_tokens: New tokens per prompt.
        temperature: Of the sampling; every prompt has its own seed.
    """

    def __init__(
        self,
        twin: LoadedPair,
        latency: LatencyModel,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        temperature: float = 0.0,
    ) -> None:
        self._twin = twin
        self._latency = latency
        self._prompts = prompts
        self._num_tokens = num_tokens
        self._temperature = temperature
        self._texts = [_text(self._decode(prompt, plain_policy())) for prompt in prompts]

    def count(self, policy: Shape | ShapePolicy) -> Count:
        """Decode every prompt under a policy, or always under one shape.

        Raises:
            TextMismatchError: a text is not plain decoding's.
        """
        tokens = 0
        passes = 0
        ms = 0.0
        plain_ms = 0.0
        for index, prompt in enumerate(self._prompts):
            results = self._decode(prompt, self._fixed(policy) if isinstance(policy, Shape) else policy)
            if _text(results) != self._texts[index]:
                raise TextMismatchError(
                    f"{policy} writes another text than plain decoding on prompt {index}"
                )
            chosen = [result for result in results if not result.caught_up]
            tokens += sum(len(result.tokens) for result in chosen)
            passes += len(chosen)
            ms += sum(self._step_ms(result) for result in chosen)
            plain_ms += sum(
                len(result.tokens) * self._latency.plain_ms(result.context_len) for result in chosen
            )
        return Count(tokens, passes, ms, plain_ms)

    def best(self, shapes: Mapping[str, Shape]) -> str:
        """The name of the structure with the largest speedup by Eq. 3: how baselines are tuned."""
        speedups = {name: self.count(shape).speedup for name, shape in shapes.items()}
        return max(speedups, key=lambda name: speedups[name])

    def _fixed(self, shape: Shape) -> FixedShape:
        return FixedShape(
            shape,
            self._twin.acceptance.nearest(self._temperature),
            self._latency,
            self._twin.bundle.config.verify_widths,
        )

    def _decode(self, prompt: Sequence[int], policy: ShapePolicy) -> list[StepResult]:
        sampling = SamplingConfig(temperature=self._temperature, seed=sum(prompt))
        return list(
            self._twin.engine.generate(
                prompt,
                policy,
                GenerateConfig(max_new_tokens=self._num_tokens, ignore_eos=True, sampling=sampling),
            )
        )

    def _step_ms(self, result: StepResult) -> float:
        return structure_ms(
            result.shape, self._latency, verified=result.verified, context_len=result.context_len
        )


def _text(results: Sequence[StepResult]) -> list[int]:
    return [token for result in results for token in result.tokens]


def candidates(structure: str, pair: LoadedPair, *, verify: int | None = None) -> dict[str, Shape]:
    """The settings among which a baseline is tuned, by their printed form.

    Args:
        structure: "sequence", "DISCO", "K-ary" or "OPT-Tree".
        verify: Most nodes to verify; None for no limit.
    """
    config = pair.bundle.config
    widths = config.verify_widths if verify is None else (verify,)
    depths = [depth for depth in DEPTHS if depth <= config.max_depth and depth < widths[-1]]
    most = depths[-1]
    shapes: list[Shape] = {
        "sequence": lambda: [sequence(depth) for depth in depths],
        "DISCO": lambda: [dynamic_sequence(most, threshold) for threshold in THRESHOLDS],
        "K-ary": lambda: [
            k_ary(branches, config.max_depth, num_nodes=width)
            for branches in BRANCHES
            if branches <= config.num_candidates
            for width in widths
        ],
        "OPT-Tree": lambda: [
            opt_tree(width, config.widths[-1], config.max_depth, gain)
            for width in widths
            for gain in MIN_GAINS
        ],
    }[structure]()
    return {f"{structure} {shape}": shape for shape in shapes}
