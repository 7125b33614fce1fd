"""The harness of every claim: arms take turns prompt by prompt, texts are compared before speeds,
figures carry their spread.

```
round:     prompt 0          prompt 1          prompt 2
order:     A  B  C  stream   B  C  stream  A   C  stream  A  B

Each round starts with the next arm, so no arm always follows the same one.
```
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.lib.sources import code_digests
from yggdrasil.store import artifacts

__all__ = [
    "SETTLE_SECONDS",
    "Arm",
    "DeviceStream",
    "Generation",
    "MemoryStream",
    "Rounds",
    "Stream",
    "TextMismatchError",
    "environment",
    "interleave",
    "ratio",
    "save_result",
    "spread",
]

RESULTS = Path(__file__).parents[1] / "results"
RESAMPLES = 2000  # bootstrap
SETTLE_SECONDS = 0.05  # OpenMP's threads spin for milliseconds after their work and slow what follows


class TextMismatchError(AssertionError):
    """An arm that must emit the reference's tokens did not: its speed is not reported."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt decoded by one arm.

    Args:
        token_ids: New tokens.
        total_ms: Wall clock of the whole call, prefill included.
        first_ms: Wall clock until the first new tokens were there.
        first_tokens: How many came then.
        target_passes: Target forwards; whether prefill is among them depends on the arm.
    """

    token_ids: Sequence[int]
    total_ms: float
    first_ms: float
    first_tokens: int
    target_passes: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token over the whole call: the headline of every arm."""
        return self.total_ms / len(self.token_ids)

    @property
    def later_tpot_ms(self) -> float:
        """Milliseconds per token after the first ones: decoding alone."""
        return (self.total_ms - self.first_ms) / max(1, len(self.token_ids) - self.first_tokens)

    @property
    def aal(self) -> float:
        """Emitted tokens per target forward."""
        return len(self.token_ids) / self.target_passes


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode a prompt.

    Args:
        name: In tables and JSON.
        exact: Whether its tokens must equal the reference arm's; if not, agreement is counted.
        num_prompts: Number of rounds, the first ones, that it takes part in; None for all.
    """

    name: str
    generate: Callable[[Sequence[int]], Generation]
    exact: bool = True
    num_prompts: int | None = None


@dataclass(frozen=True)
class Rounds:
    """What all arms did, prompt by prompt.

    Args:
        by_arm: Generations by arm, in the order of the prompts.
        stream_gb_per_s: Memory read rate measured between the arms of each round; empty without a stream.
    """

    by_arm: Mapping[str, Sequence[Generation]]
    stream_gb_per_s: Sequence[float]

    def tpots(self, arm: str) -> list[float]:
        return [generation.tpot_ms for generation in self.by_arm[arm]]

    def later_tpots(self, arm: str) -> list[float]:
        return [generation.later_tpot_ms for generation in self.by_arm[arm]]

    def fastest(self, names: Sequence[str]) -> str:
        """The arm with the smallest median time per token."""
        return min(names, key=lambda name: float(np.median(self.tpots(name))))

    def agreement(self, arm: str, reference: str) -> dict[str, Any]:
        """How many prompts got the same text from both arms, and where the others part."""
        pairs = list(zip(self.by_arm[arm], self.by_arm[reference], strict=False))
        partings = [
            parting
            for one, other in pairs
            if (parting := _parting(one.token_ids, other.token_ids)) is not None
        ]
        return {
            "equal_prompts": len(pairs) - len(partings),
            "prompts": len(pairs),
            "first_difference_at": partings,
        }

    def assert_equal_texts(self, arms: Sequence[Arm], reference: str) -> None:
        """Raises TextMismatchError unless every exact arm emitted the reference's tokens."""
        for arm in arms:
            if not arm.exact:
                continue
            for index, (one, other) in enumerate(
                zip(self.by_arm[arm.name], self.by_arm[reference], strict=False)
            ):
                parting = _parting(one.token_ids, other.token_ids)
                if parting is not None:
                    raise TextMismatchError(
                        f"{arm.name} differs from {reference} on prompt {index} at token {parting}: no "
                        "speed is reported"
                    )


def _parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ."""
    if list(one) == list(other):
        return None
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def interleave(
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    reference: str,
    stream: Stream | None = None,
    tick: Callable[[str], None] = lambda line: None,
) -> Rounds:
    """Run all arms in turn on every prompt, after a warm-up of each that does not count, and compare their
    texts.

    Args:
        arms: Names are unique.
        reference: Name of the arm whose tokens the exact arms must emit.
        stream: Measured once a round, so that the ceiling drifts with the machine as the arms do.
        tick: Called after every round.

    Raises:
        TextMismatchError: an exact arm emitted other tokens.
    """
    by_arm: dict[str, list[Generation]] = {arm.name: [] for arm in arms}
    rates: list[float] = []
    for arm in arms:
        arm.generate(prompts[0])
    for index, prompt in enumerate(prompts):
        start = index % len(arms)
        for arm in [*arms[start:], *arms[:start]]:
            if arm.num_prompts is None or index < arm.num_prompts:
                by_arm[arm.name].append(arm.generate(prompt))
        if stream is not None:
            rates.append(stream.gb_per_s())
        tick(
            f"prompt {index + 1} of {len(prompts)}: "
            + ", ".join(
                f"{name} {done[-1].tpot_ms:.2f}" for name, done in by_arm.items() if len(done) > index
            )
        )
    rounds = Rounds(by_arm, rates)
    rounds.assert_equal_texts(arms, reference)
    return rounds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """How many times less the second takes than the first, prompt by prompt: median, spread and the
    bootstrap 95 % interval of the median.

    Args:
        slow: Milliseconds by prompt.
        fast: Milliseconds by prompt; prompts that only one of the two has are left out.
    """
    ratios = np.array([one / other for one, other in zip(slow, fast, strict=False)])
    draws = np.random.default_rng(0).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {
        **spread(ratios.tolist()),
        "ci95": [round(float(low), 4), round(float(high), 4)],
        "prompts": len(ratios),
    }


class Stream(Protocol):
    """Measures the rate of the memory that weights are read from."""

    def gb_per_s(self, rounds: int = 3) -> float:
        """The best of a few passes, in 10^9 bytes a second."""
        ...


class DeviceStream:
    """The rate of a CUDA device's memory: a copy from one buffer to another, bytes read and bytes written
    both counted.

    Args:
        size_bytes: Of each buffer; far larger than the device's cache. Both stay allocated.
    """

    def __init__(self, size_bytes: int = 2**30) -> None:
        self._source = torch.ones(size_bytes // 8, dtype=torch.int64, device="cuda")
        self._copy = torch.empty_like(self._source)

    def gb_per_s(self, rounds: int = 3) -> float:
        """The best of a few copies, in 10^9 bytes a second."""
        return max(self._pass() for _ in range(rounds))

    def _pass(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._copy.copy_(self._source)
        end.record()
        end.synchronize()
        return float(2 * self._source.nbytes / begin.elapsed_time(end) / 1e6)


READER = r"""
#include <stddef.h>
#include <stdint.h>
uint64_t read_words(const uint64_t *words, size_t count, int num_threads) {
  uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) num_threads(num_threads)
  for (size_t block = 0; block < count; block += 64) { /* 8 cache lines, asked for 8 kB ahead */
    for (size_t line = 0; line < 64; line += 8) __builtin_prefetch(words + block + 1024 + line);
    uint64_t sum = 0;
    for (size_t i = 0; i < 64; ++i) sum += words[block + i];
    total += sum;
  }
  return total;
}
"""


class MemoryStream:
    """The rate at which all threads together read memory from one end to the other: the ceiling of plain
    decoding.

    Args:
        size_bytes: Larger than any cache by far: the last-level cache of a server can hold hundreds of
            megabytes.

    Raises:
        CalledProcessError: gcc failed.

    Cost: the buffer stays allocated. A compiled loop, because `torch.sum` and `numpy.sum` do not reach the
    rate of the memory on every machine."""

    def __init__(self, size_bytes: int = 3 * 2**29) -> None:
        # written once: untouched pages would all be the same one
        self._words = np.ones(size_bytes // 512 * 64, dtype=np.uint64)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "reader.c"
            library = Path(folder) / "reader.so"
            source.write_text(READER)
            subprocess.run(
                ["gcc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", source, "-o", library],
                check=True,
            )
            self._read = ctypes.CDLL(str(library)).read_words
        self._read.restype = ctypes.c_uint64
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def gb_per_s(self, rounds: int = 3) -> float:
        """The best of a few passes over the buffer, in 10^9 bytes a second.

        Returns when its threads sleep: while they spin, the next forward takes 1.5 times as long.
        """
        rate = max(self._pass() for _ in range(rounds))
        time.sleep(SETTLE_SECONDS)
        return rate

    def _pass(self) -> float:
        start = time.perf_counter()
        total = self._read(self._words.ctypes.data, len(self._words), torch.get_num_threads())
        seconds = time.perf_counter() - start
        assert total == len(self._words), "every word is a one, and every word is read"
        return float(self._words.nbytes / seconds / 1e9)


def environment() -> dict[str, Any]:
    """What a figure depends on apart from the code: processor, versions, date, commit, load."""
    import transformers

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "code": code_digests(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": artifacts.cpu_flags(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu_model() -> str:
    """Name of the processor; two generations may share it, so on x86 also its family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.processor())
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields.get('model', '?')})"


def _commit() -> str | None:
    """The commit of the working tree, marked when it has changes; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def save_result(claim: str, payload: Mapping[str, Any], *, rehearsal: bool = False) -> Path:
    """Write `<claim>.json` into `bench/results`, or the folder that `YGG_BENCH_RESULTS` names; a rehearsal
    goes to the artifact root and replaces no result.
    """
    folder = (
        artifacts.root() / "bench_results"
        if rehearsal
        else Path(os.environ.get("YGG_BENCH_RESULTS", RESULTS))
    )
    artifacts.save_bytes(folder / f"{claim}.json", (json.dumps(payload, indent=1) + "\n").encode())
    return folder / f"{claim}.json"
