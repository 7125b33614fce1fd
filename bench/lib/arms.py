"""Arms of our engine, and the figures of an arm: what every claim about speed shares."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, mean, median
from typing import Any

from bench.lib.harness import Arm, Generation, Rounds, ratio, spread
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.kv import KVCache
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import structure_ms
from yggdrasil.policy.shape import FixedShape, ShapePolicy
from yggdrasil.report.run import Run
from yggdrasil.state import PLAIN, Shape, StepResult

__all__ = [
    "PLAIN_ARM",
    "arm_summary",
    "fixed_policy",
    "geometric_means",
    "our_arm",
    "plain_arm",
    "policy_arm",
    "ratios_to",
    "uncaptured",
]

PLAIN_ARM = "plain"


def fixed_policy(pair: LoadedPair, shape: Shape, *, temperature: float = 0.0) -> FixedShape:
    """Always this shape, unguarded; K by the objective where the shape leaves it open."""
    return FixedShape(
        shape, pair.acceptance.nearest(temperature), pair.latency, pair.bundle.config.verify_widths
    )


def policy_arm(
    name: str,
    pair: LoadedPair,
    policy: ShapePolicy,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    num_prompts: int | None = None,
    grammar: GrammarConfig | None = None,
) -> Arm:
    """Our engine under one policy; its tokens must equal plain decoding's, greedy or sampled with the
    prompt's own seed. The end of a text counts only under a grammar.

    Where the compiler measured graphs that round differently, texts are compared instead: such a pair
    promises no more."""

    def generate(prompt: Sequence[int]) -> Generation:
        options = {"temperature": temperature, "seed": sum(prompt), "grammar": grammar}
        config = GenerateConfig(
            max_new_tokens=num_tokens,
            ignore_eos=grammar is None,
            plain=name == PLAIN_ARM,
            sampling=SamplingConfig.of(options),
        )
        start = time.perf_counter()
        run = Run(pair, prompt, config, policy=policy).complete()
        total_ms = (time.perf_counter() - start) * 1e3
        report = run.to_json()
        return Generation(
            token_ids=run.tokens,
            total_ms=total_ms,
            first_ms=run.ttft_ms,
            first_tokens=len(run.results[0].tokens),
            target_passes=len(run.results),  # the first ends the prompt; others of it emit nothing
            detail={key: report[key] for key in ("predicted_speedup", "stages_ms", "graphs_ms")}
            | {
                "shapes": Counter(str(each.shape) for each in run.results),
                "profile_ms": sum(_profile_ms(pair, each) for each in run.results),
            },
        )

    return Arm(name=name, generate=generate, exact=not pair.bundle.inexact_widths, num_prompts=num_prompts)


def _profile_ms(pair: LoadedPair, result: StepResult) -> float:
    """Milliseconds of a step by the pair's profile."""
    return structure_ms(
        result.shape, pair.latency, verified=result.verified, context_len=result.context_len
    )


def our_arm(name: str, pair: LoadedPair, num_tokens: int, temperature: float, shape: Shape | None) -> Arm:
    """Our engine under one shape, or under the pair's default policy."""
    return policy_arm(
        name, pair, pair.policy(temperature=temperature, shape=shape), num_tokens, temperature=temperature
    )


def plain_arm(pair: LoadedPair, num_tokens: int, *, temperature: float = 0.0) -> Arm:
    """Our engine without speculation: the reference of texts."""
    return our_arm(PLAIN_ARM, pair, num_tokens, temperature, PLAIN)


def uncaptured(pair: LoadedPair) -> LoadedPair:
    """A pair on CUDA whose graphs launch their kernels one by one: the gain of capturing them. It has
    caches of its own.
    """
    bundle = pair.bundle
    engine = pair.engine
    models = [
        CompiledModel(
            bundle.folder / kind,
            model.menu,
            weights=model.weights,
            cache=KVCache(model.cache.shape, dtype=bundle.dtype, device=bundle.config.device),
            device=bundle.config.device,
            max_depth=bundle.config.path_depth,
            num_candidates=model.num_candidates,
            vocab=model.vocab,
            command=bundle.command,
            captured=False,
        )
        for kind, model in (("target", engine.target), ("draft", engine.draft))
    ]
    return replace(
        pair, engine=Engine(*models, max_context=engine.max_context, eos_tokens=tuple(engine.eos_tokens))
    )


def arm_summary(rounds: Rounds, name: str) -> dict[str, Any]:
    """The figures of one arm."""
    done = rounds.by_arm[name]
    summary = {
        "tpot_ms": spread(rounds.tpots(name)),
        "tpot_after_first_ms": spread(rounds.later_tpots(name)),
        "ttft_ms": spread([each.first_ms for each in done]),
        "tok_per_s": round(1e3 / spread(rounds.tpots(name))["median"], 2),
        "aal": round(mean(each.aal for each in done), 3),
        "same_text_as_plain": rounds.agreement(name, PLAIN_ARM),
        "tpot_ms_by_prompt": [round(each.tpot_ms, 3) for each in done],
    }
    if "stages_ms" in done[0].detail:
        summary |= {
            "shapes": dict(sum((each.detail["shapes"] for each in done), Counter()).most_common()),
            "stages_ms_per_pass": _per_pass(done, "stages_ms"),
            "graphs_ms_per_pass": _per_pass(done, "graphs_ms"),
        }
    return summary


def _per_pass(done: Sequence[Generation], key: str) -> dict[str, float]:
    """Median milliseconds of every stage per target forward; prefill per prompt."""
    return {
        stage: round(
            median(
                each.detail[key].get(stage, 0.0) / (1 if stage == "prefill" else each.target_passes)
                for each in done
            ),
            4,
        )
        for stage in done[0].detail[key]
    }


def ratios_to(rounds: Rounds, name: str) -> dict[str, dict[str, Any]]:
    """How many times faster than every other arm one arm decodes, prompt by prompt, prefill left out."""
    return {
        other: ratio(rounds.later_tpots(other), rounds.later_tpots(name))
        for other in rounds.by_arm
        if other != name
    }


def geometric_means(ratios: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Over workloads, of the median ratio to every arm."""
    return {name: round(geometric_mean(each[name]["median"] for each in ratios), 3) for name in ratios[0]}
