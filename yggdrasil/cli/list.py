"""`ygg list`: the pairs in the store."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
List every compiled pair with its size on disk and its models. A `current` pair runs on this machine as
it is. For any other pair, a second line gives the reason and the command that compiles it again; `ygg
rm NAME` removes it.
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
    """List them."""
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
