"""Arms of other systems: transformers, plain and assisted, on the same checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.harness import Arm, Generation

__all__ = ["ASSISTED", "EAGER", "transformers_arms"]

EAGER = "transformers eager"
ASSISTED = "transformers assisted"


class _Arrivals(BaseStreamer):
    """Notes when tokens arrive: generate() puts the prompt first, then what every target forward emits."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None: ...


def transformers_arms(
    target: Path, draft: Path, *, num_tokens: int, assistant_tokens: Sequence[int], dtype: torch.dtype = torch.bfloat16, num_prompts: int | None = None
) -> list[Arm]:
    """Eager `generate`, and assisted generation with its defaults and with every constant draft length.

    The constant lengths switch the confidence threshold off, so that k means k; the defaults keep it. Text never ends early: no token is the end.
    Their numerics differ from ours (another order of summation), so texts are compared, not asserted.

    Args:
        target: Folder.
        draft: Folder.
        num_tokens: New tokens per prompt.
        assistant_tokens: The constant draft lengths.
        dtype: Of both models.
        num_prompts: Rounds in which these arms take part; None in all.
    """
    model, assistant = _load(target, dtype), _load(draft, dtype)
    defaults: dict[str, Any] = {"num_assistant_tokens": None, "assistant_confidence_threshold": None}
    settings = {f"{ASSISTED}, default": defaults}
    for count in assistant_tokens:
        settings[f"{ASSISTED}, k={count}"] = {"num_assistant_tokens": count, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}

    def arm(name: str, assistant_settings: dict[str, Any] | None) -> Arm:
        def generate(prompt: Sequence[int]) -> Generation:
            if assistant_settings is None:
                return _generate(model, None, prompt, num_tokens)
            assistant.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **assistant_settings)
            return _generate(model, assistant, prompt, num_tokens)

        return Arm(name=name, generate=generate, exact=False, num_prompts=num_prompts)

    return [arm(EAGER, None), *(arm(name, chosen) for name, chosen in settings.items())]


def _load(folder: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def _generate(model: Any, assistant: Any | None, prompt: Sequence[int], num_tokens: int) -> Generation:
    arrivals = _Arrivals()
    ids = torch.tensor([list(prompt)])
    options = {} if assistant is None else {"assistant_model": assistant}
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, streamer=arrivals, **options)
    total_ms = (time.perf_counter() - start) * 1e3
    return Generation(
        token_ids=out[0, len(prompt) :].tolist(),
        total_ms=total_ms,
        first_ms=(arrivals.times[1] - start) * 1e3,
        first_tokens=arrivals.counts[1],
        target_passes=len(arrivals.counts) - 1,  # prefill emits tokens and is one of them
    )
