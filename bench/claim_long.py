"""Does a long text cost what its context costs and nothing more: no recompilation, no stall, and the same
tokens as plain decoding?

The bundled pair with its position limit raised, so that its context holds 4096 tokens: it was trained on
texts of 1024, so what it writes there is no good text, but real weights run through real graphs. A prompt
of 3000 tokens of held-out stories is prefilled in chunks, then the default policy and plain decoding write
on to the end of the context, end of text ignored. Shapes and contexts differ from step to step, so a step
is judged against the median of the steps around it.

Refuted if anything compiles, if a step takes 20 ms more than the steps around it, or if the two write
different tokens. `--prompts` and `--target-parameters` are of no consequence."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.workloads import STORIES
from yggdrasil.bundle import bundled_models
from yggdrasil.config import CompileConfig, GenerateConfig
from yggdrasil.errors import ArtifactError
from yggdrasil.kernels.compilations import compilations, no_compilation
from yggdrasil.offline.pipeline import compile_pair
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.report.progress import RichProgress
from yggdrasil.state import PLAIN, Shape
from yggdrasil.store import artifacts

PAIR_NAME = "tinystories-4096"
CONTEXT = 4096
PROMPT_LEN = 3000
MENU = CompileConfig(max_context=CONTEXT, widths=(1, 4), verify_widths=(8, 16, 32))
MOST_STALL_MS = 20.0
AROUND = 15  # steps on either side that a step is judged by


def long_pair() -> LoadedPair:
    """The bundled checkpoints under a longer position limit, compiled once with a small menu."""
    folders = [
        _with_positions(model, artifacts.root() / "bench_models" / f"{PAIR_NAME}-{kind}")
        for kind, model in zip(("target", "draft"), bundled_models(), strict=True)
    ]
    try:
        return load_pair(PAIR_NAME)
    except ArtifactError:
        compile_pair(*map(str, folders), name=PAIR_NAME, config=MENU, progress=RichProgress())
        return load_pair(PAIR_NAME)


def _with_positions(model: Path, folder: Path) -> Path:
    if not folder.exists():
        with artifacts.atomic_directory(folder) as temporary:
            shutil.copytree(model, temporary, dirs_exist_ok=True)
            config = json.loads((temporary / "config.json").read_text())
            (temporary / "config.json").write_text(
                json.dumps({**config, "max_position_embeddings": CONTEXT + 2 * MENU.path_depth})
            )
    return folder


def run(pair: LoadedPair, prompt: Sequence[int], num_tokens: int, shape: Shape | None) -> dict[str, Any]:
    """One generation: tokens, milliseconds until the first, and context and milliseconds of later steps.

    The draft's forwards over the prompt, after the first token, are in neither.
    """
    config = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True, plain=shape is PLAIN)
    before = compilations()
    start = time.perf_counter()
    tokens: list[int] = []
    steps: list[tuple[int, float]] = []
    with no_compilation():
        for result in pair.engine.generate(prompt, pair.policy(shape=shape), config):
            if tokens:
                steps.append((result.context_len, result.ms))
            else:
                first_ms = (time.perf_counter() - start) * 1e3
            tokens += result.tokens
    return {
        "token_ids": tokens,
        "first_ms": first_ms,
        "steps": steps,
        "compilations": compilations() - before,
    }


def stalls(steps: Sequence[tuple[int, float]]) -> list[float]:
    """How many milliseconds every step took beyond the median of the steps around it."""
    times = [ms for _, ms in steps]
    return [
        ms - median(times[max(0, place - AROUND) : place + AROUND + 1]) for place, ms in enumerate(times)
    ]


def by_context(steps: Sequence[tuple[int, float]], width: int = 256) -> dict[str, float]:
    """Median milliseconds of the steps of every `width` tokens of context."""
    places = sorted({context // width for context, _ in steps})
    return {
        str(place * width): round(median(ms for context, ms in steps if context // width == place), 3)
        for place in places
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Both generations, the first of each not counted."""
    pair = long_pair()
    text = " ".join(STORIES.test_texts)
    prompt = pair.tokenizer.encode(text)[:PROMPT_LEN]
    num_tokens = min(
        options.tokens, pair.bundle.max_context - len(prompt) - 2 * pair.bundle.config.path_depth
    )
    arms: dict[str, Any] = {}
    for _ in range(2):
        arms = {
            name: run(pair, prompt, num_tokens, shape)
            for name, shape in (("speculative", None), ("plain", PLAIN))
        }
    assert arms["speculative"]["token_ids"] == arms["plain"]["token_ids"], (
        "speculation wrote other tokens than plain decoding"
    )
    return {
        "context": pair.bundle.max_context,
        "prompt_tokens": len(prompt),
        "new_tokens": num_tokens,
        "same_text": True,
        "arms": {name: _summary(arm, len(prompt)) for name, arm in arms.items()},
    }


def _summary(arm: Mapping[str, Any], prompt_len: int) -> dict[str, Any]:
    late = stalls(arm["steps"])
    return {
        "compilations": arm["compilations"],
        "prefill_tok_per_s": round(prompt_len / arm["first_ms"] * 1e3, 1),
        "tokens_per_step": round((len(arm["token_ids"]) - 1) / len(arm["steps"]), 3),
        "step_ms_by_context": by_context(arm["steps"]),
        "longest_stall_ms": round(max(late), 3),
        "stalls": sum(ms > MOST_STALL_MS for ms in late),
        "steps": [[context, round(ms, 3)] for context, ms in arm["steps"]],
    }


def table(result: Mapping[str, Any]) -> str:
    """A line for each arm, and its steps by context."""
    lines = [
        f"{result['prompt_tokens']} tokens of prompt, {result['new_tokens']} new ones, context "
        f"{result['context']}, same tokens"
    ]
    for name, arm in result["arms"].items():
        lines.append(
            f"{name:<12} prefill {arm['prefill_tok_per_s']:.0f} tokens/s, {arm['tokens_per_step']:.2f} "
            f"tokens a step, compiled {arm['compilations']}, "
            f"longest stall {arm['longest_stall_ms']:.2f} ms"
        )
        lines.append(
            "  ms per step from context "
            + ", ".join(f"{context}: {ms:.2f}" for context, ms in arm["step_ms_by_context"].items())
        )
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Every step's milliseconds over its context."""
    axes = figure.subplots()
    for name, arm in result["arms"].items():
        axes.plot(*zip(*arm["steps"], strict=True), ".", markersize=2, label=name)
    axes.set(xlabel="tokens of context", ylabel="ms of a step", ylim=(0, None))
    axes.legend()


CLAIM = Claim(
    name="long",
    doc=__doc__,
    options=(prompts_option(1), tokens_option(CONTEXT)),
    measure=measure,
    table=table,
    draw=draw,
    size=(8, 4),
)

if __name__ == "__main__":
    CLAIM.main()
