"""The host names that a server answers to.

A web page can make its own name resolve to this machine (DNS rebinding). A browser then sends the page's
requests here and lets the page read the answers. The page cannot change the Host header, which contains its
own name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

__all__ = ["HostNames"]


class HostNames:
    """The allowed host names. Every IP address is allowed, because only names can be rebound.

    Args:
        names: Names in addition to `localhost` and the name of this machine.

    >>> names = HostNames(["gpu.example.org"])
    >>> [names.allow(host) for host in ("localhost:8000", "[::1]:8000", "10.0.0.7", "GPU.example.org.")]
    [True, True, True, True]
    >>> [names.allow(host) for host in ("evil.example", "user@localhost", "[::1")]
    [False, False, False]
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        own = socket.gethostname()
        self._names = {name.lower().rstrip(".") for name in ("localhost", own, f"{own}.local", *names)}

    def allow(self, host: str) -> bool:
        """Whether a Host header, with or without a port, names this server."""
        try:
            split = urlsplit(f"//{host}")
            name = (split.hostname or "").rstrip(".")
        except ValueError:  # a bracket that does not close
            return False
        is_own = name in self._names or name.endswith(".localhost") or _is_address(name)
        return is_own and split.username is None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
