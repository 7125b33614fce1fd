"""`--threads` of the verbs that run models."""

from __future__ import annotations

import argparse

__all__ = ["add_threads", "apply_threads"]


def add_threads(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option; `what` ends its help."""
    parser.add_argument("--threads", type=int, metavar="N", help=f"threads to run on (default: one for every core){what}")


def apply_threads(options: argparse.Namespace) -> None:
    """Run on as many threads as the option says from now on.

    Raises:
        ConfigError: fewer than one, or more than there can be.
    """
    if options.threads is not None:
        from yggdrasil.kernels.threads import set_num_threads  # imports torch

        set_num_threads(options.threads)
