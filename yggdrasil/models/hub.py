"""Where a model's files are: a folder, or the hub, which is asked only where it answers."""

from __future__ import annotations

import json
import os
import re
import socket
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from yggdrasil.errors import BrokenCheckpoint, ConfigError, first_line

__all__ = ["check_name", "hub_reason", "read_json"]

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
CONNECT_SECONDS = 3.0


def check_name(name: str) -> None:
    """Settle where `name` is looked up. Where the hub does not answer, only what was downloaded before is
    looked at: retries would take half a minute a file.

    Raises:
        ConfigError: it is neither a folder nor what an id on the hub looks like.
    """
    if Path(name).is_dir():
        return
    if Path(name).exists() or not HUB_ID.fullmatch(name):
        reason = "it is a file" if Path(name).exists() else "there is no such folder"
        raise ConfigError(
            "model", name, "a folder with a config.json, or the id of a model on the hub", reason
        )
    if not _hub_answers():
        _stay_offline()


@cache
def _hub_answers() -> bool:
    """Whether the hub, or the proxy that leads to it, takes a connection."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    endpoint = urlsplit(constants.ENDPOINT)
    proxies = getproxies()
    way = urlsplit(proxies.get(endpoint.scheme) or proxies.get("all") or constants.ENDPOINT)
    try:
        socket.create_connection(
            (way.hostname, way.port or (80 if way.scheme == "http" else 443)), CONNECT_SECONDS
        ).close()
    except OSError:
        return False
    return True


def _stay_offline() -> None:
    """For the libraries of this process, which read the variable when they were imported, and for the
    processes that it starts.
    """
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def hub_reason(error: Exception) -> str:
    """Why a look-up on the hub failed, in a line."""
    from huggingface_hub import constants

    return (
        "the hub does not answer, and the model was not downloaded before"
        if constants.is_offline_mode()
        else first_line(error)
    )


def read_json(name: str, file: str) -> dict[str, Any] | None:
    """A JSON file of a model folder or hub id; None where the model has none.

    Raises:
        BrokenCheckpoint: it is there and is no JSON object.
        ConfigError: the hub does not answer, and whether there is one was not looked up before.
    """
    path = _find(name, file)
    if path is None:
        return None
    try:
        payload = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(path, f"not JSON ({error})") from None
    if not isinstance(payload, dict):
        raise BrokenCheckpoint(path, "not a JSON object")
    return payload


def _find(name: str, file: str) -> Path | None:
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ConfigError("model", name, f"one whose {file} the hub gives", hub_reason(error)) from None
    return None if found is None else Path(found)
