"""Is the text of speculative decoding the text of plain decoding, token for token, in both dtypes and with sampling?

On the bundled pair, prompts of 1 to 150 tokens of stories, encyclopedia and code, end of text ignored:

- float32, greedy: trees against plain decoding, and plain decoding against transformers' `generate` (the first prompts only: it is slow);
- float32 and bfloat16, temperature 0.8 with top-p 0.95 and a seed per prompt: trees against plain decoding with that seed;
- bfloat16, greedy: trees against plain decoding;

each over the default policy and a wide and deep tree that verifies all its nodes. Refuted by a single token.

Run with `python -m bench.claim_exact [--prompts 200] [--tokens 256] [--json]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from bench.harness import environment, save_result
from bench.workloads import WORKLOADS
from yggdrasil.build import compile_pair
from yggdrasil.bundle import BUNDLED, LoadedPair, bundled_models, is_compiled, load_pair
from yggdrasil.cli.progress import RichProgress
from yggdrasil.config import CompileConfig, GenerateConfig, SamplingConfig
from yggdrasil.report import Run
from yggdrasil.state import PLAIN, Shape

CLAIM = "exact"
SHAPES = {"default": None, "tree": Shape(8, 7, 57)}
TRANSFORMERS_PROMPTS = 30
LONGEST_PROMPT = 150
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def pair_in(dtype: str) -> LoadedPair:
    """The bundled pair, compiled in `dtype` under a name of its own where that is not the default."""
    name = BUNDLED if dtype == CompileConfig().dtype else f"{BUNDLED}-{dtype}"
    if not is_compiled(name):
        target, draft = bundled_models()
        compile_pair(str(target), str(draft), name=name, config=CompileConfig(dtype=dtype), progress=RichProgress())
    return load_pair(name)


def prompts_of(pair: LoadedPair, count: int) -> list[list[int]]:
    """Beginnings of test and validation texts in turn by kind, of every length up to the longest."""
    kinds = [[*workload.test_texts, *workload.validation_texts] for workload in WORKLOADS.values()]
    mixed = [text for same_place in zip_longest(*kinds) for text in same_place if text is not None]
    return [pair.tokenizer.encode(text)[: 1 + 37 * index % LONGEST_PROMPT] for index, text in enumerate(mixed[:count])]


def texts(pair: LoadedPair, prompts: Sequence[Sequence[int]], num_tokens: int, shape: Shape | None, sampled: bool) -> list[list[int]]:
    """What the engine writes after every prompt under one shape."""
    written = []
    for seed, prompt in enumerate(prompts):
        sampling = SamplingConfig(seed=seed, **SAMPLED) if sampled else SamplingConfig()
        config = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True, sampling=sampling)
        written.append(Run(pair, prompt, config, policy=pair.policy(temperature=sampling.temperature, shape=shape)).complete().token_ids)
    return written


def transformers_texts(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What transformers writes in float32, greedily."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled_models()[0], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    settings: dict[str, Any] = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([list(prompt)]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]


def compare(name: str, ours: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Count texts that differ and where the first does."""
    apart = [index for index, (one, other) in enumerate(zip(ours, reference, strict=True)) if list(one) != list(other)]
    tokens = sum(len(text) for text in ours)
    print(f"{name:<44} {len(ours)} prompts, {tokens} tokens, {len(apart)} texts differ", flush=True)
    return {"comparison": name, "prompts": len(ours), "tokens": tokens, "texts_that_differ": len(apart), "which": apart}


def main() -> None:
    """Compare and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document on the last line")
    options = parser.parse_args()
    rows = []
    for dtype in ("float32", "bfloat16"):
        pair = pair_in(dtype)
        prompts = prompts_of(pair, options.prompts)
        for sampled in (False, True):
            plain = texts(pair, prompts, options.tokens, PLAIN, sampled)
            kind = f"{dtype}, {'temperature 0.8' if sampled else 'greedy'}"
            if dtype == "float32" and not sampled:
                few = prompts[:TRANSFORMERS_PROMPTS]
                rows.append(compare(f"{kind}: plain against transformers", plain[: len(few)], transformers_texts(few, options.tokens)))
            rows += [compare(f"{kind}: {name} against plain", texts(pair, prompts, options.tokens, shape, sampled), plain) for name, shape in SHAPES.items()]
    result = {"claim": CLAIM, "environment": environment(), "sampling": SAMPLED, "comparisons": rows}
    save_result(CLAIM, result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
