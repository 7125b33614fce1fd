"""The library that draws, which an installation may lack."""

from __future__ import annotations

from typing import Any

from yggdrasil.errors import ConfigError

__all__ = ["load_matplotlib"]


def load_matplotlib() -> Any:
    """The `matplotlib` package, its figures and patches imported.

    Raises:
        ConfigError: it is not installed.

    Cost: its import, a third of a second the first time.
    """
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.patches
    except ImportError:
        raise ConfigError("matplotlib", "not installed", "installed for plots", "pip install 'yggdrasil-decoding[plots]'") from None
    return matplotlib
