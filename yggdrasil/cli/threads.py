"""`--threads` of the verbs that run models."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yggdrasil.policy.latency import LatencyModel

__all__ = ["add_threads", "apply_threads", "note_threads"]


def add_threads(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option; `what` is the end of its help text."""
    parser.add_argument(
        "--threads", type=int, metavar="N", help=f"threads to run on (default: one per core){what}"
    )


def apply_threads(options: argparse.Namespace) -> None:
    """Set the number of threads from the option.

    Raises:
        ConfigError: the number is below one or too large.
    """
    if options.threads is not None:
        from yggdrasil.kernels.threads import set_num_threads  # imports torch

        set_num_threads(options.threads)


def note_threads(latency: LatencyModel, command: str) -> None:
    """Print a line on standard error if the pair was measured with another number of threads."""
    from yggdrasil.kernels.threads import get_num_threads

    count = get_num_threads()
    if latency.num_threads not in (0, count):
        print(
            f"ygg: the pair was measured with --threads {latency.num_threads}, this run has {count}: "
            "the text is the same, but the speed is not the best; "
            f"`{command} --threads {count}` measures it again",
            file=sys.stderr,
        )
