"""How long does a new user wait, and does a later start compile anything?

In an empty artifact root, with an empty cache of Inductor's: the wall clock of the first `ygg generate`,
which compiles the bundled pair, and then of five later starts, alternately speculative and plain: imports
and loading, time to the first token, tokens per second, graphs compiled. Refuted if the first takes more
than four minutes, a later one more than five seconds to its first token, if a later one compiles anything,
or if the two kinds write different tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.lib.claim import Claim, Log

COMMAND = [
    sys.executable,
    "-m",
    "yggdrasil",
    "generate",
    "Tom and Lily went to the park",
    "--max-new-tokens",
    "200",
    "--json",
]
STARTS = 5
QUICK_STARTS = 1


def start(home: str, *options: str) -> dict[str, Any]:
    """One process: its own report and its wall clock."""
    begin = time.perf_counter()
    # where a new user's machine has no precompiled headers yet
    env = {**os.environ, "YGG_HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}
    done = subprocess.run([*COMMAND, *options], env=env, capture_output=True, text=True, check=True)
    return {"wall_ms": (time.perf_counter() - begin) * 1e3, **json.loads(done.stdout)}


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """The first start, then the later ones, speculative and plain in turn."""
    num_starts = QUICK_STARTS if options.quick else STARTS
    with tempfile.TemporaryDirectory() as home:
        first = start(home)
        runs = [(start(home), start(home, "--plain")) for _ in range(num_starts)]
    assert all(run["token_ids"] == first["token_ids"] for pair in runs for run in pair), (
        "a start wrote other tokens"
    )
    later = [run for run, _ in runs]
    return {
        "settings": {"later_starts": num_starts, "rehearsal": options.quick},
        "first_wall_ms": first["wall_ms"],
        "first_compilations": first["compilations"],
        "later_startup_ms": median(run["startup_ms"] for run in later),
        "later_ttft_ms": median(run["ttft_ms"] for run in later),
        "later_wall_ms": median(run["wall_ms"] for run in later),
        "later_compilations": sum(run["compilations"] for pair in runs for run in pair),
        "tok_per_s": median(run["tok_per_s"] for run in later),
        "plain_tok_per_s": median(run["tok_per_s"] for _, run in runs),
        "aal": later[0]["aal"],
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for a person."""
    return (
        f"first start {result['first_wall_ms'] / 1e3:.0f} s; later {result['later_startup_ms']:.0f} ms "
        f"+ {result['later_ttft_ms']:.0f} ms to the first token\n"
        f"{result['tok_per_s']:.0f} tokens/s, plain {result['plain_tok_per_s']:.0f}; compiled later: "
        f"{result['later_compilations']}"
    )


CLAIM = Claim(
    name="start",
    doc=__doc__,
    measure=measure,
    table=table,
    devices=(),
    rehearsal=f"{QUICK_STARTS} later start of each kind instead of {STARTS}",
)

if __name__ == "__main__":
    CLAIM.main()
