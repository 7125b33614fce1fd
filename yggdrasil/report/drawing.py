"""Draw with matplotlib, which may not be installed, into a folder that may not be writable."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from yggdrasil.errors import ConfigError, UsageError
from yggdrasil.store.storage import write_whole

__all__ = ["load_matplotlib", "save_figure"]


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


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG; raises ConfigError if the folder cannot be written."""
    image = BytesIO()
    figure.savefig(image, format="png", dpi=130)
    try:
        write_whole(path, image.getvalue())
    except OSError as error:
        raise ConfigError(
            "out", str(path.parent), f"a folder that you can write ({error.strerror})"
        ) from None
