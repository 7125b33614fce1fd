"""Models of the hub: what is downloaded, with which progress bars, and the line where it fails."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, filter_repo_objects
from huggingface_hub.utils import tqdm as hub_tqdm
from tiny_pair import SilentProgress

from yggdrasil.errors import ConfigError
from yggdrasil.offline.download import download

REPOSITORY = (
    *("README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("model.safetensors.index.json", "consolidated.00.safetensors", "pytorch_model.bin", "model.gguf"),
    *("original/params.json", "onnx/model.onnx", "fp16/model.safetensors", "vocab.txt", "spiece.model"),
)


class Hub:
    """A hub with one model, in place of the real one; downloads are empty files."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: tuple[str, ...] = REPOSITORY
        self.downloaded: list[str] = []
        self.failure: Exception | None = None

    def snapshot_download(self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        if self.failure is not None:
            raise self.failure
        chosen = list(
            filter_repo_objects(self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        for file in hub_tqdm(chosen, desc=f"Fetching {name}", file=self.screen):
            (self.cache / file).touch()
            self.downloaded.append(file)
        return str(self.cache)

    screen = io.StringIO()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    made = Hub(tmp_path)
    made.screen = io.StringIO()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    disable_progress_bars()  # as transformers' loading leaves them
    yield made


class Noted(SilentProgress):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_a_model_is_downloaded_once_in_its_first_form_with_the_hub_s_bar(hub: Hub) -> None:
    progress = Noted()
    download("org/name", progress)
    assert sorted(hub.downloaded) == [
        *("chat_template.jinja", "config.json", "generation_config.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("model.safetensors.index.json", "spiece.model", "tokenizer.json", "tokenizer_config.json"),
        "vocab.txt",
    ]
    assert progress.lines == ["download org/name, or find it in the cache"]
    assert "Fetching org/name: 100%" in hub.screen.getvalue()
    assert not are_progress_bars_disabled()


def test_pickled_weights_are_taken_where_there_are_no_others(hub: Hub) -> None:
    hub.files = tuple(file for file in REPOSITORY if not file.endswith(".safetensors"))
    download("org/name", SilentProgress())
    assert "pytorch_model.bin" in hub.downloaded
    assert "onnx/model.onnx" not in hub.downloaded


def test_a_user_s_wish_for_no_bars_is_respected(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    download("org/name", SilentProgress())
    assert hub.screen.getvalue() == ""
    assert are_progress_bars_disabled()


def test_files_here_and_machines_without_a_network_download_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(str(tmp_path), SilentProgress())
    (tmp_path / "model.gguf").touch()
    download(str(tmp_path / "model.gguf"), SilentProgress())
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    download("org/name", SilentProgress())
    assert hub.downloaded == []


@pytest.mark.parametrize(
    "failure",
    (
        OSError(28, "No space left on device"),
        ConnectionError("Read timed out\nafter 10 s"),
        ValueError("wrong revision"),
    ),
    ids=str,
)
def test_a_download_that_fails_is_one_line(hub: Hub, failure: Exception) -> None:
    hub.failure = failure
    with pytest.raises(ConfigError, match="model: 'org/name' is not allowed") as caught:
        download("org/name", SilentProgress())
    assert "\n" not in str(caught.value)
    assert str(failure).splitlines()[0] in str(caught.value)
