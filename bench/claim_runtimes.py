"""What does static compilation gain for one token of plain decoding, and is our plain baseline the fastest
of the runtimes?

Paper: Fig. 4. The target alone decodes, one token at a time, greedy, bf16, arms interleaved prompt by
prompt:

- eager: transformers, static cache;
- compiled, dynamic shapes: `torch.compile` (Inductor), the cache grows by a token at every step;
- compiled, static shapes: `torch.compile(dynamic=False)` over a static cache;
- plain: our graphs, compiled ahead of time with frozen shapes over packed weights;
- CUDA graphs: only with a GPU, else null in the result: then our graphs are replayed as CUDA graphs and
  `plain` is that arm.

Prefill is left out: it runs eagerly in the transformers arms. Transformers sums in another order, so texts
are compared, not asserted. Refuted if static shapes are not faster than eager, or if `plain` is not the
fastest arm."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from bench.lib.arms import PLAIN_ARM, arm_summary, plain_arm, ratios_to
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import Arm, Generation, interleave
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from bench.peers.processes import EAGER
from yggdrasil.offline.traces import PROMPT_LEN

DYNAMIC = "compiled, dynamic shapes"
STATIC = "compiled, static shapes"
CUDA = "CUDA graphs"


def transformers_arm(
    name: str, model: Any, forward: Callable[..., Any], new_cache: Callable[[], Any], num_tokens: int
) -> Arm:
    """Greedy decoding, a token at a time through `forward`; the prompt runs eagerly."""

    @torch.inference_mode()
    def generate(prompt: Sequence[int]) -> Generation:
        cache = new_cache()
        start = time.perf_counter()
        token = (
            model(torch.tensor([list(prompt)]), past_key_values=cache, use_cache=True)
            .logits[:, -1:]
            .argmax(-1)
        )
        first_ms = (time.perf_counter() - start) * 1e3
        tokens = [token.item()]
        while len(tokens) < num_tokens:
            token = forward(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            tokens.append(token.item())
        total_ms = (time.perf_counter() - start) * 1e3
        return Generation(
            token_ids=tokens, total_ms=total_ms, first_ms=first_ms, first_tokens=1, target_passes=num_tokens
        )

    return Arm(name=name, generate=generate, exact=False)


def transformers_arms(folder: Any, num_tokens: int) -> list[Arm]:
    """Eager, compiled for any shape, compiled for one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    static = StaticCache(config=model.config, max_cache_len=PROMPT_LEN + num_tokens)

    def emptied() -> Any:
        static.reset()  # compiled code is bound to its address
        return static

    return [
        transformers_arm(EAGER, model, model, emptied, num_tokens),
        transformers_arm(
            DYNAMIC,
            model,
            torch.compile(model.__call__, dynamic=True),
            lambda: DynamicCache(config=model.config),
            num_tokens,
        ),
        transformers_arm(STATIC, model, torch.compile(model.__call__, dynamic=False), emptied, num_tokens),
    ]


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """All runtimes on the same prompts."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    arms = [plain_arm(pair, options.tokens), *transformers_arms(under_test.target.folder, options.tokens)]
    rounds = interleave(
        arms, beginnings(STORIES.test_texts, pair, options.prompts), reference=PLAIN_ARM, tick=log
    )
    ratios = ratios_to(rounds, PLAIN_ARM)
    return {
        "target": under_test.target.to_json(),
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm} | {CUDA: None},
        "cuda_graphs": "not measured: no GPU"
        if pair.bundle.config.device == "cpu"
        else "the plain arm replays CUDA graphs",
        "plain_over": ratios,
        "static_over_eager": round(ratios[EAGER]["median"] / ratios[STATIC]["median"], 3),
        "reached": ratios[EAGER]["median"] > ratios[STATIC]["median"]
        and all(found["median"] > 1 for found in ratios.values()),
    }


def table(result: Mapping[str, Any]) -> str:
    """Milliseconds per token and speedup over eager."""
    lines = [f"{'runtime':<28} {'ms/token':>9} {'p10':>8} {'p90':>8} {'plain is faster by':>19}"]
    for name, arm in result["arms"].items():
        if arm is None:
            lines.append(f"{name:<28} {result['cuda_graphs']}")
            continue
        tpot = arm["tpot_after_first_ms"]
        found = result["plain_over"].get(name)
        lines.append(
            f"{name:<28} {tpot['median']:>9.2f} {tpot['p10']:>8.2f} {tpot['p90']:>8.2f}"
            + (f" {found['median']:>11.2f} {found['ci95']}" if found else "")
        )
    return "\n".join(lines)


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Bars of milliseconds per token."""
    arms = {name: arm["tpot_after_first_ms"] for name, arm in result["arms"].items() if arm is not None}
    order = [EAGER, DYNAMIC, STATIC, PLAIN_ARM]
    axes = figure.subplots()
    medians = [arms[name]["median"] for name in order]
    errors = [
        [arms[name]["median"] - arms[name]["p10"] for name in order],
        [arms[name]["p90"] - arms[name]["median"] for name in order],
    ]
    axes.bar_label(
        axes.bar(["eager", DYNAMIC, STATIC, "ahead of time, packed"], medians, yerr=errors, capsize=3),
        fmt="%.2f",
        label_type="center",
    )
    axes.set(title="runtimes of plain decoding (paper: Fig. 4)", ylabel="ms per token")


CLAIM = Claim(
    name="runtimes",
    doc=__doc__,
    options=(prompts_option(10), tokens_option(48)),
    measure=measure,
    table=table,
    draw=draw,
    size=(8, 4),
)

if __name__ == "__main__":
    CLAIM.main()
