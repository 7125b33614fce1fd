"""Is the text of speculative decoding the text of plain decoding, token for token, in both dtypes and with
rounded weights, with sampling and with logits processors?

On the bundled pair, prompts of 1 to 150 tokens of stories, encyclopedia and code, end of text ignored:

- float32, greedy: plain decoding against transformers' `generate` (the first prompts only: it is slow);
- float32, bfloat16, and a target with weights of int8 and of int4, greedy, and at temperature 0.8 with
  top-p 0.95 and a seed per prompt: trees against plain decoding with that seed and the same weights;
- all of these with logits processors, too (penalties, n-grams, bias, bans); and in float32, greedy, plain
  decoding against transformers' `generate` with its own processors;

each over the default policy and a wide and deep tree that verifies all its nodes. Refuted by a single
token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from bench.lib.claim import Claim, Log, Option, int_from, tokens_option
from bench.lib.pair import compiled_pair
from bench.lib.workloads import WORKLOADS
from yggdrasil.bundle import BUNDLED, bundled_models
from yggdrasil.config import CompileConfig, GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.report.run import Run
from yggdrasil.state import PLAIN, Shape

SHAPES = {"default": None, "tree": Shape(8, 7, 57)}
TRANSFORMERS_PROMPTS = 30
LONGEST_PROMPT = 150
QUICK_PROMPTS = 3
QUICK_TOKENS = 16
FORMATS = {
    "float32": CompileConfig(dtype="float32"),
    "bfloat16": CompileConfig(),
    "int8": CompileConfig(weights="int8"),
    "int4": CompileConfig(weights="int4"),
}
"""Of the target's weights; those of the draft and of the KV are bfloat16, except in float32."""
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
BIAS = {13: 1.5, 20: -2.0}
BANNED = ((30,), (40, 41))
PROCESSED = {"repetition_penalty": 1.15, "no_repeat_ngram_size": 4, "logit_bias": BIAS, "banned": BANNED}
OF_TRANSFORMERS = {
    "repetition_penalty": 1.15,
    "no_repeat_ngram_size": 4,
    "sequence_bias": [[[token], value] for token, value in BIAS.items()],
    "bad_words_ids": [list(sequence) for sequence in BANNED],
}
"""`PROCESSED` for transformers, which has no presence and frequency penalties."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": SAMPLED,
    "processors": PROCESSED,
    "processors, temperature 0.8": {
        **SAMPLED,
        **PROCESSED,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}
"""Options of `SamplingConfig.of`."""


def pair_in(weights: str) -> LoadedPair:
    """The bundled pair, compiled in a format under a name of its own where that is not the default."""
    config = FORMATS[weights]
    name = BUNDLED if config == CompileConfig() else f"{BUNDLED}-{weights}"
    return compiled_pair(*bundled_models(), name=name, config=config)


def mixed_texts(count: int) -> list[tuple[str, str]]:
    """Test and validation texts with their kinds, the kinds in turn."""
    kinds = [
        [(kind, text) for text in (*workload.test_texts, *workload.validation_texts)]
        for kind, workload in WORKLOADS.items()
    ]
    return [each for same_place in zip_longest(*kinds) for each in same_place if each is not None][:count]


def prompts_of(pair: LoadedPair, count: int) -> list[list[int]]:
    """Beginnings of the mixed texts, of every length up to the longest."""
    return [
        pair.tokenizer.encode(text)[: 1 + 37 * index % LONGEST_PROMPT]
        for index, (_, text) in enumerate(mixed_texts(count))
    ]


def settings_of(options: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What was decoded, so that the result can be read without this script."""
    lens: dict[str, list[int]] = {kind: [] for kind in WORKLOADS}
    for (kind, _), prompt in zip(mixed_texts(len(prompts)), prompts, strict=True):
        lens[kind].append(len(prompt))
    return {
        "pair": BUNDLED,
        "formats": list(FORMATS),
        "prompts": len(prompts),
        "prompt_lens_by_text": lens,
        "tokens": options.tokens,
        "kinds": KINDS,
        "seeds": [0, len(prompts) - 1],  # each prompt's is its index
        "shapes": {name: str(shape or "policy") for name, shape in SHAPES.items()},
        "rehearsal": options.quick,
    }


def texts(
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    shape: Shape | None,
    kind: Mapping[str, Any],
) -> list[list[int]]:
    """What the engine writes after every prompt under one shape."""
    written = []
    for seed, prompt in enumerate(prompts):
        sampling = SamplingConfig.of({**kind, "seed": seed})
        config = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True, sampling=sampling)
        written.append(
            Run(pair, prompt, config, policy=pair.policy(temperature=sampling.temperature, shape=shape))
            .complete()
            .tokens
        )
    return written


def transformers_texts(
    prompts: Sequence[Sequence[int]], num_tokens: int, processors: Mapping[str, Any]
) -> list[list[int]]:
    """What transformers writes in float32, greedily."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled_models()[0], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    settings: dict[str, Any] = {
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        **processors,
    }
    return [
        model.generate(torch.tensor([list(prompt)]), **settings)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def compare(
    name: str, ours: Sequence[Sequence[int]], reference: Sequence[Sequence[int]], log: Log
) -> dict[str, Any]:
    """Count texts that differ, and list them."""
    apart = [
        index
        for index, (one, other) in enumerate(zip(ours, reference, strict=True))
        if list(one) != list(other)
    ]
    tokens = sum(len(text) for text in ours)
    log(f"{name:<56} {len(ours)} prompts, {tokens} tokens, {len(apart)} texts differ")
    return {
        "comparison": name,
        "prompts": len(ours),
        "tokens": tokens,
        "texts_that_differ": len(apart),
        "which": apart,
    }


def comparisons(
    pair: LoadedPair, weights: str, prompts: Sequence[Sequence[int]], num_tokens: int, log: Log
) -> list[dict[str, Any]]:
    """All of one format's, of every kind; in float32 greedy text is transformers' too."""
    rows = []
    for kind, options in KINDS.items():
        plain = texts(pair, prompts, num_tokens, PLAIN, options)
        title = f"{weights}, {kind}"
        if weights == "float32" and kind in ("greedy", "processors"):
            processors = OF_TRANSFORMERS if options else {}
            few = prompts if options else prompts[:TRANSFORMERS_PROMPTS]
            theirs = transformers_texts(few, num_tokens, processors)
            rows.append(compare(f"{title}: plain against transformers", plain[: len(few)], theirs, log))
        for name, shape in SHAPES.items():
            written = texts(pair, prompts, num_tokens, shape, options)
            rows.append(compare(f"{title}: {name} against plain", written, plain, log))
    return rows


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every comparison."""
    rows: list[dict[str, Any]] = []
    for weights in FORMATS:
        pair = pair_in(weights)
        prompts = prompts_of(pair, options.prompts)
        rows += comparisons(pair, weights, prompts, options.tokens, log)
    return {"settings": settings_of(options, prompts), "comparisons": rows}


def table(result: Mapping[str, Any]) -> str:
    """How many texts differ; every comparison has had its line."""
    rows = result["comparisons"]
    differing = sum(row["texts_that_differ"] for row in rows)
    return f"{differing} of {sum(row['prompts'] for row in rows)} texts differ"


CLAIM = Claim(
    name="exact",
    doc=__doc__,
    options=(
        Option(
            "--prompts", "of all kinds of text together", default=200, quick=QUICK_PROMPTS, type=int_from(1)
        ),
        tokens_option(256, quick=QUICK_TOKENS, minimum=1),
    ),
    measure=measure,
    table=table,
    devices=(),
    rehearsal=f"{QUICK_PROMPTS} prompts of {QUICK_TOKENS} tokens",
)

if __name__ == "__main__":
    CLAIM.main()
