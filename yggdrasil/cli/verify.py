"""`ygg verify`: read every artifact of a pair in full."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
Read all files of a pair and compare them with their digests: one line for every file that is whole. At the
first damaged file, one line names it and the command that builds it again.

Other commands read only files whose size or time has changed since they were last read. This one reads
everything; use it after trouble with a disk or a copy.

  ygg verify              the bundled pair
  ygg verify mine
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "verify",
        help="check every byte of a compiled pair",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the pair (default: the bundled one)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Check one pair."""
    from yggdrasil.bundle import BUNDLED
    from yggdrasil.inventory import verified_files

    for path in verified_files(BUNDLED if options.name is None else options.name):
        print(f"whole  {path.stat().st_size / 1e6:9.1f} MB  {path}")
