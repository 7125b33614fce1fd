"""The command line, one module a verb. `main` is the entry point of `ygg` and of `python -m yggdrasil`."""

from yggdrasil.cli.main import main

__all__ = ["main"]
