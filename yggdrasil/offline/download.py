"""Download a model from the hub, with the hub's own progress bars."""

from __future__ import annotations

from pathlib import Path

from yggdrasil.errors import ConfigError
from yggdrasil.models.hub import hub_reason, snapshot
from yggdrasil.offline.progress import Progress
from yggdrasil.store.sources import is_gguf

__all__ = ["download"]

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
PICKLED = ("*.bin",)  # the weights of a model that has no others


def download(name: str, progress: Progress) -> None:
    """Download the files of a model that its cache lacks; nothing for files here, or without a network.

    Transformers loads the model from the cache afterwards.

    Args:
        name: Folder, GGUF file or hub id, which `load_config` has checked.

    Raises:
        ConfigError: the hub does not give the files.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]

    if Path(name).is_dir() or is_gguf(name) or constants.is_offline_mode():
        return
    progress.note(f"download {name}, or find it in the cache")
    if not constants.HF_HUB_DISABLE_PROGRESS_BARS:  # the user's own wish
        enable_progress_bars()  # turned off where transformers' own are
    try:
        folder = snapshot(name, *FILES)
        if not any(folder.glob("*.safetensors")):
            snapshot(name, *PICKLED)
    except Exception as error:  # of the network, of the hub, or of the disk
        raise ConfigError("model", name, "one whose files the hub gives", hub_reason(error)) from None
