"""`ygg list`: the pairs in the store."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
List every pair with its size on disk, its models and the formats of rounded weights. `current` pairs can
be used on this machine. For an `unusable` pair a second line gives the reason and the command that compiles
it again; `ygg rm NAME` removes it.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "list",
        help="list the compiled pairs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def _described(model: str, weights: str) -> str:
    return model if weights == "bf16" else f"{model} in {weights}"


def run(options: argparse.Namespace) -> None:
    """List the pairs."""
    from yggdrasil.inventory import stored_pairs
    from yggdrasil.store.artifacts import root

    pairs = list(stored_pairs())
    if not pairs:
        print(f"no pairs in {root()}; `ygg compile TARGET DRAFT --name NAME` makes one")
    width = max((len(pair.name) for pair in pairs), default=0)
    for pair in pairs:
        state = "current" if pair.problem is None else "unusable"
        models = " + ".join(_described(*each) for each in zip(pair.models, pair.weights, strict=True))
        print(f"{pair.name:<{width}}  {state:<8}  {pair.num_bytes / 1e6:9.1f} MB  {models}".rstrip())
        if pair.problem is not None:
            print(f"{'':<{width}}  {pair.problem}")
