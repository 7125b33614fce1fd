"""What a compilation is identified by, and what it settles before it builds anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY

from yggdrasil import build


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama_folders: tuple[str, str]) -> dict[str, str]:
    """A hub with one model, `org/draft`, as it lies in the cache of transformers; its commit is under that key."""
    commits = {"org/draft": "1" * 40}
    load_config, load_tokenizer = build.load_config, build.load_tokenizer
    monkeypatch.setattr(build, "load_config", lambda name: load_config(llama_folders[1] if name in commits else name))
    monkeypatch.setattr(build, "load_tokenizer", lambda name: load_tokenizer(llama_folders[1] if name in commits else name))
    monkeypatch.setattr("transformers.utils.cached_file", lambda name, file: str(tmp_path / "snapshots" / commits[name] / file))
    return commits


def fingerprint(target: str, draft: str) -> str:
    return build._describe(target, draft, "pair", TINY, build.CALIBRATION_TEXT).folder.name


def test_a_new_commit_of_a_draft_on_the_hub_is_another_pair_beside_a_target_in_a_folder(hub: dict[str, str], llama_folders: tuple[str, str]) -> None:
    before = fingerprint(llama_folders[0], "org/draft")
    assert fingerprint(llama_folders[0], "org/draft") == before
    hub["org/draft"] = "2" * 40
    assert fingerprint(llama_folders[0], "org/draft") != before != fingerprint(*llama_folders)


def test_exchanged_models_are_another_pair(llama_folders: tuple[str, str]) -> None:
    assert fingerprint(*llama_folders) != fingerprint(*reversed(llama_folders))  # type: ignore[arg-type]
