"""A fine-tuned model takes the graphs of its base model, and writes its own text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pair
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from yggdrasil import load_pair
from yggdrasil.bundle import Bundle
from yggdrasil.kernels.compilations import compilations
from yggdrasil.offline import build
from yggdrasil.offline.pipeline import compile_pair
from yggdrasil.offline.reuse import Stored, copy_graph, recipes, record_recipes, stored_graphs
from yggdrasil.store import artifacts
from yggdrasil.store.digests import Ledger

PROMPT = "Once upon a time"
NUM_TOKENS = 32


class Notes(tiny_pair.SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def tuned(llama_folders: tuple[str, str], tmp_path: Path) -> Path:
    """The tiny target with other weights."""
    folder = shutil.copytree(llama_folders[0], tmp_path / "tuned")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            weights[name] = tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_tuned_model_compiles_no_graph_and_writes_the_text_of_its_own_weights(
    tiny_bundle: Bundle, llama_folders: tuple[str, str], tuned: Path
) -> None:
    shutil.rmtree(artifacts.compile_cache() / "tuned", ignore_errors=True)  # in a kept store
    progress = Notes()
    before = compilations()
    calibration = tuned.parent / "stories.txt"
    tiny_pair.save_calibration(calibration)
    models = (str(tuned), llama_folders[1])
    compile_pair(*models, name="tuned", config=TINY, calibration=calibration, progress=progress)
    assert compilations() == before
    assert [line for line in progress.lines if "graphs are copied" in line]
    pair = load_pair("tuned")
    tokens = pair.tokens(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32).eval()
    prompt = torch.tensor([tokens])
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    result = pair.generate(tokens, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert list(result.tokens) == expected[0, len(tokens) :].tolist()
    base = load_pair(tiny_bundle.name).generate(tokens, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert result.tokens != base.tokens


def test_another_structure_has_other_graphs(
    tiny_bundle: Bundle, llama_folders: tuple[str, str], tmp_path: Path
) -> None:
    jobs = build._graph_jobs(tiny_bundle)
    by_job = recipes(jobs)
    assert len(set(by_job.values())) == len(jobs)
    assert set(by_job.values()) <= stored_graphs().keys()
    folder = shutil.copytree(llama_folders[0], tmp_path / "target")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    changed = [replace(job, model=str(folder)) for job in jobs if job.model == llama_folders[0]]
    assert changed
    assert not set(recipes(changed).values()) & set(by_job.values())


def test_a_graph_that_an_interrupted_build_lacks_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    whole = tmp_path / "compile_cache" / "b" / "1"
    for folder in (whole, *(tmp_path / "compile_cache" / name / "2" for name in "ac")):
        record_recipes(folder, {"target/tokens_2.pt2": "recipe"})
    (whole / "target").mkdir()
    (whole / "target" / "tokens_2.pt2").write_bytes(b"graph")
    assert stored_graphs() == {"recipe": Stored(whole, "target/tokens_2.pt2")}


def test_a_damaged_graph_is_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "target" / "tokens_2.pt2"
    source.parent.mkdir()
    source.write_bytes(b"graph")
    Ledger(tmp_path).record("target/tokens_2.pt2")
    graph = Stored(tmp_path, "target/tokens_2.pt2")
    copy = tmp_path / "other" / "tokens_2.pt2"
    assert copy_graph(graph, copy)
    assert copy.read_bytes() == b"graph"
    copy.unlink()
    source.write_bytes(b"grapf")
    assert not copy_graph(graph, copy)
    assert not copy.exists()
    source.unlink()
    assert not copy_graph(graph, copy)
