"""Does speculation help as much when the text must be an instance of a JSON schema?

A list of two objects with texts, numbers and choices, at temperatures 0 and 0.8, every prompt with its own
seed. Interleaved: plain decoding and the default policy under the schema, and trees of one shape with and
without it. The texts under the schema must be equal, parse and have the schema's form.

Refuted at a temperature where the default policy decodes less than 1.5 times as fast as plain decoding
under the same schema, where a step under the schema takes more than 1.10 times as long as one without it,
or where a text is not the one of plain decoding or not of the schema's form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.lib.arms import PLAIN_ARM, arm_summary, fixed_policy, policy_arm
from bench.lib.claim import Claim, Log, prompts_option, tokens_option
from bench.lib.harness import Generation, Rounds, interleave, ratio
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.config import GrammarConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.state import Shape

TEMPERATURES = (0.0, 0.8)
SPEEDUP = 1.5
STEP_COST = 1.1
OURS = "yggdrasil"
SHAPED = "one shape"
FREE = "one shape, without a schema"
SHAPE = Shape(4, 5, 12)
KINDS = ("cat", "dog", "bird", "fish")
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "kind": {"enum": list(KINDS)},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "is_happy": {"type": "boolean"},
    },
    "required": ["name", "kind", "age", "is_happy"],
    "additionalProperties": False,
}
PETS = GrammarConfig.of("json", {"type": "array", "items": PET, "minItems": 2, "maxItems": 2})


def is_pets(text: str) -> bool:
    """Whether a text is an instance of the schema."""
    pets = json.loads(text)
    return len(pets) == 2 and all(
        list(pet) == PET["required"]
        and 2 <= len(pet["name"]) <= 12
        and pet["kind"] in KINDS
        and type(pet["age"]) is int
        and 0 <= pet["age"] <= 20
        and isinstance(pet["is_happy"], bool)
        for pet in pets
    )


def measure_at(
    pair: LoadedPair, temperature: float, options: argparse.Namespace, log: Log
) -> dict[str, Any]:
    """All arms at one temperature."""
    log(f"temperature {temperature:g}")
    arm = partial(policy_arm, num_tokens=options.tokens, temperature=temperature)
    shaped = fixed_policy(pair, SHAPE, temperature=temperature)
    arms = [
        arm(PLAIN_ARM, pair, plain_policy(), grammar=PETS),
        arm(OURS, pair, pair.policy(temperature=temperature), grammar=PETS),
        arm(SHAPED, pair, shaped, grammar=PETS),
        replace(arm(FREE, pair, shaped), exact=False),
    ]
    prompts = beginnings(STORIES.test_texts, pair, options.prompts)
    rounds = interleave(arms, prompts, reference=PLAIN_ARM, tick=log)
    speedup = ratio(rounds.later_tpots(PLAIN_ARM), rounds.later_tpots(OURS))
    step_cost = ratio(_step_ms(rounds, SHAPED), _step_ms(rounds, FREE))
    texts = _finished(pair, rounds.by_arm[OURS])
    wrong = sum(not is_pets(text) for text in texts)
    return {
        "arms": {name: arm_summary(rounds, name) for name in rounds.by_arm},
        "speculative_over_plain": speedup,
        "constrained_over_free_step": step_cost,
        "differing_texts": 0,  # `interleave` would have raised
        "finished_texts": len(texts),
        "wrong_texts": wrong,
        "goals": {
            "speculative_over_plain": speedup["median"] >= SPEEDUP,
            "constrained_over_free_step": step_cost["median"] <= STEP_COST,
            "wrong_texts": wrong == 0,
        },
    }


def _step_ms(rounds: Rounds, name: str) -> list[float]:
    """Milliseconds of a step after the first one, prompt by prompt."""
    return [
        (each.total_ms - each.first_ms) / max(1, each.target_passes - 1) for each in rounds.by_arm[name]
    ]


def _finished(pair: LoadedPair, generations: Sequence[Generation]) -> list[str]:
    """The texts that ended before the limit."""
    ends = pair.bundle.eos_tokens
    return [
        pair.tokenizer.decode(each.token_ids[:-1])
        for each in generations
        if each.token_ids and each.token_ids[-1] in ends
    ]


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Every temperature."""
    under_test = subject(options)
    pair = under_test.pair()
    log(under_test.target.statement)
    found = {f"{each:g}": measure_at(pair, each, options, log) for each in TEMPERATURES}
    return {
        "target": under_test.target.to_json(),
        "schema": json.loads(PETS.source),
        "shape": str(SHAPE),
        "temperatures": found,
    }


def table(result: Mapping[str, Any]) -> str:
    """Temperature by temperature."""
    lines = []
    for temperature, found in result["temperatures"].items():
        speedup = found["speculative_over_plain"]
        cost = found["constrained_over_free_step"]
        lines.append(
            f"temperature {temperature}: {speedup['median']:.2f} {speedup['ci95']} times plain decoding "
            f"under the schema, a step costs {cost['median']:.3f} {cost['ci95']} of a free one, "
            f"{found['finished_texts']} finished texts, {found['wrong_texts']} wrong"
        )
    return "\n".join(lines)


CLAIM = Claim(
    name="constrained",
    doc=__doc__,
    options=(prompts_option(10), tokens_option(256, quick=192)),
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    CLAIM.main()
