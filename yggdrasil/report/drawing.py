"""Import matplotlib, which may not be installed."""

from __future__ import annotations

from typing import Any

from yggdrasil.errors import UsageError

__all__ = ["load_matplotlib"]


def load_matplotlib() -> Any:
    """The `matplotlib` package with figures and patches.

    Raises:
        UsageError: it is not installed.

    Cost: its import, a third of a second the first time.
    """
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.patches
    except ImportError:
        raise UsageError(
            "matplotlib is not installed, but plots need it", "pip install 'yggdrasil-decoding[plots]'"
        ) from None
    return matplotlib
