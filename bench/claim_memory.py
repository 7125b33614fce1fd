"""Does the menu share one copy of the weights, however many graphs it has?

Resident memory of a process that has imported everything, then loaded a pair and decoded 64 tokens through every graph, less
what it had after the imports; against the bytes of the two models' files and caches. Refuted at 1.3 times the weights plus the
caches or more.

Run with `python -m bench.claim_memory [--pair NAME] [--json]`.
"""

from __future__ import annotations

import argparse
import json

import psutil

from bench.harness import environment, save_result
from yggdrasil.bundle import BUNDLED, LoadedPair, load_pair
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import GenerateConfig
from yggdrasil.models.packing import pack_chain_
from yggdrasil.report import Run

CLAIM = "memory"


def resident_bytes() -> int:
    """Of this process, mapped files included once they were read."""
    return int(psutil.Process().memory_info().rss)


def touch(model: CompiledModel) -> None:
    """Run every graph of the menu once."""
    for size in model.menu.sizes:
        meta_NM = model.meta(size)
        pack_chain_(meta_NM, [1] * size, 0)
        model.forward(meta_NM)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default=BUNDLED)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document on the last line")
    options = parser.parse_args()
    before = resident_bytes()
    pair: LoadedPair = load_pair(options.pair)
    models = (pair.engine.target, pair.engine.draft)
    for model in models:
        assert isinstance(model, CompiledModel)
        touch(model)
    Run(pair, pair.tokenizer.encode("Once upon a time"), GenerateConfig(max_new_tokens=64, ignore_eos=True)).complete()
    grown = resident_bytes() - before
    weights = sum(model.weight_bytes for model in models if isinstance(model, CompiledModel))
    caches = sum(model.cache.storage_PL2GSF.nbytes for model in models)
    result = {
        "claim": CLAIM,
        "pair": options.pair,
        "environment": environment(),
        "num_graphs": sum(len(model.menu.sizes) for model in models if isinstance(model, CompiledModel)),
        "weight_bytes": weights,
        "cache_bytes": caches,
        "resident_bytes": grown,
        "ratio_over_weights_after_caches": (grown - caches) / weights,
    }
    save_result(f"{CLAIM}_{options.pair}", result)
    print(f"{result['num_graphs']} graphs: {grown / 1e6:.0f} MB resident, {weights / 1e6:.0f} MB weights, {caches / 1e6:.0f} MB caches")
    print(f"without the caches: {result['ratio_over_weights_after_caches']:.2f} times the weights")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
