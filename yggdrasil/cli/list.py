"""`ygg list`: the pairs in the store."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
List every pair with its size on disk and its models. `current` pairs can be used on this machine. For an
`unusable` pair a second line gives the reason and the command that compiles it again; `ygg rm NAME`
removes it.
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
        models = "" if pair.models is None else " + ".join(pair.models)
        print(f"{pair.name:<{width}}  {state:<8}  {pair.num_bytes / 1e6:9.1f} MB  {models}".rstrip())
        if pair.problem is not None:
            print(f"{'':<{width}}  {pair.problem}")
