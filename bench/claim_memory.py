"""Does the menu share one copy of the weights, however many graphs it has?

Resident memory of a process that has imported everything, then loaded a pair and decoded 64 tokens through
every graph, less what it had after the imports; against the bytes of the two models' files and caches.
Refuted at 1.3 times the weights plus the caches or more.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import psutil

from bench.lib.claim import Claim, Log, Option
from yggdrasil.bundle import BUNDLED
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import GenerateConfig
from yggdrasil.models.packing import pack_chain_
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.report.run import Run

TOKENS = 64
QUICK_TOKENS = 8


def resident_bytes() -> int:
    """Of this process, mapped files included once they were read."""
    return int(psutil.Process().memory_info().rss)


def touch(model: CompiledModel) -> None:
    """Run every graph of the menu once."""
    for size in model.menu.sizes:
        meta_NM = model.meta(size)
        pack_chain_(meta_NM, [1] * size, 0)
        model.forward(meta_NM)


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Load the pair, run all its graphs, and see what the process grew by."""
    num_tokens = QUICK_TOKENS if options.quick else TOKENS
    before = resident_bytes()
    pair: LoadedPair = load_pair(options.pair)
    models = (pair.engine.target, pair.engine.draft)
    for model in models:
        assert isinstance(model, CompiledModel)
        touch(model)
    Run(
        pair,
        pair.tokenizer.encode("Once upon a time"),
        GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True),
    ).complete()
    grown = resident_bytes() - before
    weights = sum(model.weight_bytes for model in models if isinstance(model, CompiledModel))
    caches = sum(model.cache.storage_PL2GSF.nbytes for model in models)
    return {
        "pair": options.pair,
        "settings": {"tokens": num_tokens, "rehearsal": options.quick},
        "num_graphs": sum(len(model.menu.sizes) for model in models if isinstance(model, CompiledModel)),
        "weight_bytes": weights,
        "cache_bytes": caches,
        "resident_bytes": grown,
        "ratio_over_weights_after_caches": (grown - caches) / weights,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for a person."""
    megabytes = {name: result[f"{name}_bytes"] / 1e6 for name in ("resident", "weight", "cache")}
    return (
        f"{result['num_graphs']} graphs: {megabytes['resident']:.0f} MB resident, "
        f"{megabytes['weight']:.0f} MB weights, {megabytes['cache']:.0f} MB caches\n"
        f"without the caches: {result['ratio_over_weights_after_caches']:.2f} times the weights"
    )


CLAIM = Claim(
    name="memory",
    doc=__doc__,
    options=(Option("--pair", "a compiled pair", default=BUNDLED, metavar="NAME"),),
    measure=measure,
    table=table,
    devices=(),
    rehearsal=f"{QUICK_TOKENS} tokens instead of {TOKENS}",
    variant=lambda options: [options.pair],
)

if __name__ == "__main__":
    CLAIM.main()
