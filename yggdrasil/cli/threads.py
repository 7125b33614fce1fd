"""`--threads` of the verbs that run models."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yggdrasil.policy.latency import LatencyModel

__all__ = ["add_threads", "apply_threads", "note_threads"]


def add_threads(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option; `what` ends its help."""
    parser.add_argument(
        "--threads", type=int, metavar="N", help=f"threads to run on (default: one for every core){what}"
    )


def apply_threads(options: argparse.Namespace) -> None:
    """Run on the number of threads of the option from now on.

    Raises:
        ConfigError: fewer than one, or more than there can be.
    """
    if options.threads is not None:
        from yggdrasil.kernels.threads import set_num_threads  # imports torch

        set_num_threads(options.threads)


def note_threads(latency: LatencyModel, command: str) -> None:
    """A line on standard error where the pair was measured with another number: shapes may then not be the
    best.
    """
    from yggdrasil.kernels.threads import get_num_threads

    count = get_num_threads()
    if latency.num_threads not in (0, count):
        measured = (
            f"measured with --threads {latency.num_threads}, this run has {count}: the text is the "
            "same, the speed not the best"
        )
        print(
            f"ygg: the pair was {measured}; `{command} --threads {count}` measures it again",
            file=sys.stderr,
        )
