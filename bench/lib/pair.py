"""The pair that claims are measured on: the bundled one with its target inflated to a real size, built and
compiled once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from bench.scale_pair import inflate, inflated_config, num_parameters
from yggdrasil.config import CompileConfig
from yggdrasil.errors import ArtifactError
from yggdrasil.models.load import load_config
from yggdrasil.offline.pipeline import compile_pair
from yggdrasil.offline.traces import PROMPT_LEN, read_texts
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.report.progress import RichProgress
from yggdrasil.store import artifacts

__all__ = [
    "DEFAULTS",
    "LLAMA_2_7B",
    "LLAMA_68M",
    "TEST_TEXT",
    "BenchTarget",
    "bench_target",
    "compiled_pair",
    "inflated_model",
    "prompts_from",
]

DEFAULTS = CompileConfig()
TEST_TEXT = Path(__file__).parents[1] / "data" / "prompts_stories.jsonl"
WIDTH_MULTIPLE = 4
# The matrices and the KV bytes of the real models. Heads keep the 64 and 32 features of the bundled ones,
# so there are twice as many of them as in
# Llama-2-7B (32 of 128) and in the draft (12 of 64); neither width is a power of four times the bundled
# one, so norms are rounded.
LLAMA_2_7B = {"width": 4096, "layers": 32, "intermediate": 11008, "heads": 64, "kv_heads": 64}
LLAMA_68M = {"width": 768, "layers": 2, "intermediate": 3072, "heads": 24, "kv_heads": 24}


@dataclass(frozen=True, kw_only=True)
class BenchTarget:
    """A target folder and what a reader of a figure must know about it.

    Args:
        parameters: Of the model that runs.
        source_parameters: Of the checkpoint whose function it computes; the same when nothing was inflated.
        weight_bytes: What one forward reads: everything but an untied embedding table, of which it reads a
            row per token.
        is_rounded: Whether the inflation rounded norm weights: the function is then the checkpoint's but
            for roundings.
    """

    folder: Path
    parameters: int
    source_parameters: int
    weight_bytes: int
    is_rounded: bool = False

    @property
    def statement(self) -> str:
        """To stand wherever a figure appears."""
        size = (
            f"target: {self.parameters / 1e6:.1f} M parameters, {self.weight_bytes / 1e6:.0f} MB read "
            "per pass"
        )
        if self.parameters == self.source_parameters:
            return f"{size}, a checkpoint as it is"
        text = "its text but for roundings" if self.is_rounded else "same text"
        return (
            f"{size}, a function-preserving inflation (bench/scale_pair.py) of a "
            f"{self.source_parameters / 1e6:.1f} M checkpoint: {text}, real latency"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "weight_bytes_per_pass": self.weight_bytes,
            "function_preserving_inflation": self.parameters != self.source_parameters,
            "norms_rounded": self.is_rounded,
            "source_parameters": self.source_parameters,
            "statement": self.statement,
        }


def bench_target(source: Path, min_parameters: int) -> BenchTarget:
    """The source itself if it is large enough, else its inflation under `bench_models/` in the artifact
    root, written unless it is there.

    Args:
        min_parameters: The width grows fourfold and then layers are added until the model has this many; 0
            keeps the source.
    """
    config = load_config(str(source))
    source_parameters = num_parameters(config)
    if source_parameters >= min_parameters:
        return BenchTarget(
            folder=source,
            parameters=source_parameters,
            source_parameters=source_parameters,
            weight_bytes=_weight_bytes(source),
        )
    layers = _layers(config, min_parameters)
    key = artifacts.digest(artifacts.digest_file(source / "model.safetensors"), WIDTH_MULTIPLE, layers)
    folder = artifacts.root() / "bench_models" / f"target-{key}"
    if not folder.exists():
        inflate(source, folder, width_multiple=WIDTH_MULTIPLE, layers=layers)
    return _described(folder, source_parameters)


def inflated_model(source: Path, sizes: Mapping[str, int], *, device: str) -> BenchTarget:
    """The source inflated to given sizes, kept under `bench_models/` in the artifact root.

    Args:
        sizes: Such as `LLAMA_2_7B`; see scale_pair.py.
        device: Where random weights are drawn.
    """
    config = load_config(str(source))
    key = artifacts.digest(artifacts.digest_file(source / "model.safetensors"), sizes, device)
    folder = artifacts.root() / "bench_models" / f"sized-{key}"
    if not folder.exists():
        inflate(source, folder, **sizes, device=device)
    is_exact = sizes["width"] in (config.hidden_size * 4**power for power in range(4))
    return replace(_described(folder, num_parameters(config)), is_rounded=not is_exact)


def _described(folder: Path, source_parameters: int) -> BenchTarget:
    parameters = num_parameters(load_config(str(folder)))
    return BenchTarget(
        folder=folder,
        parameters=parameters,
        source_parameters=source_parameters,
        weight_bytes=_weight_bytes(folder),
    )


def _layers(config: Any, min_parameters: int) -> int:
    first = int(config.num_hidden_layers)
    start, after = (
        num_parameters(inflated_config(config, width_multiple=WIDTH_MULTIPLE, layers=layers))
        for layers in (first, first + 1)
    )
    return first + max(0, math.ceil((min_parameters - start) / (after - start)))


def _weight_bytes(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = file.keys()
        tensors = {name: math.prod(file.get_slice(name).get_shape()) for name in names}
    is_untied = any("lm_head" in name for name in tensors)
    bytes_each = int(load_config(str(folder)).dtype.itemsize)
    return bytes_each * sum(
        count for name, count in tensors.items() if not (is_untied and "embed_tokens" in name)
    )


def compiled_pair(
    target: Path,
    draft: Path | None,
    *,
    name: str,
    remeasure: bool = False,
    config: CompileConfig = DEFAULTS,
) -> LoadedPair:
    """The pair under this name, compiled unless it is there with these models and this menu.

    Args:
        draft: None makes it from the target.
        name: In the artifact root.
        remeasure: Profile and calibrate again; finished graphs are kept.
        config: Menu and device; the context is the models'.
    """
    models = tuple(str(model.resolve()) for model in (target, draft) if model is not None)
    asked: dict[str, Any] = {"max_context": None}
    if draft is None:  # what the compiler has chosen
        asked |= {"draft_weights": config.draft_weights, "draft_layers": config.draft_layers}
    if not remeasure:
        try:
            pair = load_pair(name)
            if pair.bundle.models == models and replace(pair.bundle.config, **asked) == config:
                return pair
        except ArtifactError:
            pass  # unknown or stale: compile
    compile_pair(*models, name=name, config=config, progress=RichProgress())
    return load_pair(name)


def prompts_from(path: Path, pair: LoadedPair, count: int) -> list[list[int]]:
    """The beginnings of the first texts of a file, as tokens."""
    return [pair.tokenizer.encode(text)[:PROMPT_LEN] for text in read_texts(path)[:count]]
