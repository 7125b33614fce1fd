"""Find a model's files in a folder or on the hub; if the hub does not answer, in its local cache."""

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
from yggdrasil.store.sources import is_gguf

__all__ = ["check_name", "hub_reason", "read_json", "snapshot"]

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
CONNECT_SECONDS = 3.0
OTHERS = ["*/*", "consolidated*"]  # further formats, and Mistral's own copy of the weights


def check_name(name: str) -> None:
    """Check that `name` is a folder, a GGUF file or a valid hub id; go offline if the hub does not answer.

    Offline, only files that were downloaded before are found. Online, retries would take half a minute per
    file.

    Raises:
        ConfigError: `name` is none of them.
    """
    if Path(name).is_dir() or is_gguf(name):
        return
    if Path(name).exists() or not HUB_ID.fullmatch(name):
        reason = "it is another file" if Path(name).exists() else "there is no such folder"
        allowed = "a folder with a config.json, a GGUF file, or the id of a model on the hub"
        raise ConfigError("model", name, allowed, reason)
    if not _hub_answers():
        _stay_offline()


@cache
def _hub_answers() -> bool:
    """Whether the hub, or the proxy to it, accepts a connection."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    endpoint = urlsplit(constants.ENDPOINT)
    proxies = getproxies()
    address = proxies.get(endpoint.scheme) or proxies.get("all") or constants.ENDPOINT
    url = urlsplit(address if "://" in address else f"http://{address}")  # a proxy may be HOST:PORT
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname, port), CONNECT_SECONDS).close()
    except (OSError, ValueError):  # no answer; a port that is no number
        return False
    return True


def _stay_offline() -> None:
    from huggingface_hub import constants

    # for the processes that this one starts
    os.environ["HF_HUB_OFFLINE"] = "1"
    # for this process: the library read the variable when it was imported
    constants.HF_HUB_OFFLINE = True


def hub_reason(error: Exception) -> str:
    """The reason why a look-up on the hub failed, in one line."""
    from huggingface_hub import constants

    return (
        "the hub does not answer, and the model was not downloaded before"
        if constants.is_offline_mode()
        else first_line(error)
    )


def snapshot(name: str, *patterns: str) -> Path:
    """The folder of a hub model, with the files of these names; what the cache lacks is downloaded.

    Other formats of the same weights are left out.
    """
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=OTHERS))


def read_json(name: str, file: str) -> dict[str, Any] | None:
    """The content of a JSON file of a model; None if the model does not have the file.

    Args:
        name: Folder or hub id.

    Raises:
        BrokenCheckpoint: the file is not a JSON object.
        ConfigError: the hub does not answer, and the file was not looked up before.
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
    if is_gguf(name):
        return None
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ConfigError("model", name, f"one whose {file} the hub gives", hub_reason(error)) from None
    return None if found is None else Path(found)
