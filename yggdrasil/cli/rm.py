"""`ygg rm`: remove a pair from the store."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from yggdrasil.errors import ConfigError
from yggdrasil.store import artifacts, storage

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
Remove all files of a pair: graphs, weights, profiles and predictors. The models stay, and so do the
operators that all pairs share. There is no question before; `ygg list` shows the names.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "rm",
        help="remove a compiled pair",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="name of the pair")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Remove one pair and print the space that this freed."""
    name = options.name
    known = artifacts.pair_names()
    if name not in known:
        allowed = f"a pair in {artifacts.root()}: {', '.join(known) or 'there is none'}"
        raise ConfigError("NAME", name, allowed, "ygg list")
    with storage.store_errors(artifacts.root()), ExitStack() as locks:
        lock = artifacts.compile_cache() / name / artifacts.LOCK_NAME
        if lock.is_file():
            try:
                locks.enter_context(storage.owned(lock))
            except BlockingIOError:
                raise ConfigError(
                    "NAME", name, "a pair that is not being compiled", "end that `ygg compile` first"
                ) from None
        folders = [folder for folder in artifacts.pair_folders(name) if folder.exists()]
        freed = sum(storage.size_bytes(folder) for folder in folders)
        for folder in folders:
            storage.remove(folder)
            print(f"removed {folder}")
    print(f"freed {freed / 1e6:.1f} MB")
