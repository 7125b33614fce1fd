"""The three kinds of text that the paper's figures are measured on: prompts to test on, texts to calibrate
on, texts to tune baselines on.

The bundled models were trained on stories; wiki and code are foreign to them, so there a draft agrees with
its target less."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from yggdrasil.config import CompileConfig
from yggdrasil.offline.traces import CALIBRATION_TEXT, PROMPT_LEN, read_texts
from yggdrasil.pair import LoadedPair

__all__ = ["STORIES", "WORKLOADS", "Workload", "beginnings"]

DATA = Path(__file__).parents[1] / "data"
# of the bundled calibration text; the rest of it validates
CALIBRATION_PROMPTS = CompileConfig().calibration_texts


@dataclass(frozen=True)
class Workload:
    """One kind of text, split three ways.

    Args:
        name: "stories", "wiki" or "code".
    """

    name: str

    def __str__(self) -> str:
        return self.name

    @cached_property
    def test_texts(self) -> list[str]:
        """What speeds are measured on; nothing was trained, calibrated or tuned on it."""
        return read_texts(DATA / f"prompts_{self.name}.jsonl")

    @property
    def calibration_path(self) -> Path:
        """The file that `ygg compile` reads to calibrate."""
        return CALIBRATION_TEXT if self.name == "stories" else DATA / f"calibration_{self.name}.jsonl"

    @cached_property
    def calibration_texts(self) -> list[str]:
        """What acceptance is calibrated on."""
        return read_texts(self.calibration_path)[:CALIBRATION_PROMPTS]

    @cached_property
    def validation_texts(self) -> list[str]:
        """What the settings of baselines are tuned on."""
        return (
            read_texts(CALIBRATION_TEXT)[CALIBRATION_PROMPTS:]
            if self.name == "stories"
            else read_texts(DATA / f"validation_{self.name}.jsonl")
        )


STORIES = Workload("stories")
WORKLOADS = {workload.name: workload for workload in (STORIES, Workload("wiki"), Workload("code"))}


def beginnings(texts: list[str], pair: LoadedPair, count: int) -> list[list[int]]:
    """Prompts: the first tokens of the first texts."""
    return [pair.tokenizer.encode(text)[:PROMPT_LEN] for text in texts[:count]]
