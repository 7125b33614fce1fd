"""Run by torchrun: `compile TARGET DRAFT NAME CALIBRATION`, or `shards TARGET`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny_pair
import torch

from yggdrasil.config import CompileConfig, GenerateConfig, SamplingConfig
from yggdrasil.ranks.launch import num_ranks, rank
from yggdrasil.state import PLAIN, Shape

PROMPTS = ("Once upon a time", "One day Lily saw a small owl near the river. The owl said: let us")
FEW_GRAPHS: dict[str, Any] = {
    "dtype": "float32",
    "max_context": 128,
    "widths": (2,),
    "max_depth": 3,
    "verify_widths": (4,),
    "prefill_chunk": 16,
    "num_candidates": 2,
    "calibration_texts": 1,
    "calibration_tokens": 6,
}
SAMPLINGS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=1.0, seed=7)}
SHAPES = {"plain": PLAIN, "speculative": Shape(2, 3, 4)}
NUM_TOKENS = 48


def compile_and_write(target: str, draft: str, name: str, calibration: str) -> None:
    """Compile the pair for all processes with the fewest graphs; print texts as JSON.

    The texts are written with speculation and without.
    """
    from yggdrasil.offline.pipeline import compile_pair

    config = CompileConfig(**FEW_GRAPHS, ranks=num_ranks())
    bundle = compile_pair(
        target,
        draft,
        name=name,
        config=config,
        calibration=Path(calibration),
        progress=tiny_pair.SilentProgress(),
    )
    texts = {
        kind: {how: written(name, shape, sampling) for how, shape in SHAPES.items()}
        for kind, sampling in SAMPLINGS.items()
    }
    print(
        json.dumps(
            {
                "inexact_widths": bundle.inexact_widths,
                "kv_heads": bundle.kv_target.num_kv_heads,
                "texts": texts,
            }
        )
    )


def written(name: str, shape: Shape, sampling: SamplingConfig) -> list[list[int]]:
    """The tokens after every prompt."""
    from yggdrasil.pair import load_pair

    pair = load_pair(name)
    policy = pair.policy(shape=shape, temperature=sampling.temperature)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling)
    prompts = [pair.tokenizer.encode(prompt) for prompt in PROMPTS]
    return [
        [token for result in pair.engine.generate(prompt, policy, config) for token in result.tokens]
        for prompt in prompts
    ]


def compare_shards(target: str) -> None:
    """Fail unless this rank's part of every layer is the one that transformers gives this rank."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from yggdrasil.models.sharding import shard_

    theirs = AutoModelForCausalLM.from_pretrained(
        target, distributed_config=DistributedConfig(tp_size=num_ranks())
    )
    ours = AutoModelForCausalLM.from_pretrained(target)
    shard_(ours, rank(), num_ranks())
    for name, layer in theirs.named_modules():
        if isinstance(layer, torch.nn.Linear):
            mine = ours.get_submodule(name)
            assert torch.equal(getattr(mine, "linear", mine).weight, layer.weight.to_local()), name


def main() -> None:
    if sys.argv[1] == "shards":
        compare_shards(sys.argv[2])
    elif rank() == 0:
        from yggdrasil.ranks.lead import leading

        with leading():
            compile_and_write(*sys.argv[2:])
    else:
        from yggdrasil.ranks.follow import follow_run

        follow_run()


if __name__ == "__main__":
    main()
