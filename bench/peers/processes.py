"""Other runtimes as peers of ours, and the first of them: transformers, plain, compiled and assisted, on
the same checkpoints.

Shapes: L = tokens of a prompt.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.lib.harness import Arm, Generation
from yggdrasil.errors import YggError

__all__ = [
    "ASSISTED",
    "COMPILED",
    "EAGER",
    "LOOKUP",
    "JsonLines",
    "Peer",
    "PeerError",
    "compiled_arms",
    "lookup_arms",
    "run_logged",
    "transformers_arms",
    "transformers_peer",
]

EAGER = "transformers eager"
COMPILED = "transformers compiled"
ASSISTED = "transformers assisted"
LOOKUP = "transformers look-up"
COMPILE_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    COMPILED: {"mode": "default"},  # generate()'s own default mode only adds CUDA graphs to it
    # Inductor packs the weights for oneDNN
    f"{COMPILED}, frozen": {"mode": None, "options": {"freezing": True}},
}


class PeerError(YggError):
    """A peer could not be set up, or did not answer as asked: one line with what to do or where to
    look.
    """


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another runtime and its arms.

    Args:
        name: In tables and JSON.
        plain: Arms that decode without speculation; the first one's text is what the peer's speculative
            arms are held against.
        speculative: Arms that draft.
        record: Versions and settings, for the result.
    """

    name: str
    plain: Sequence[Arm]
    speculative: Sequence[Arm]
    record: Mapping[str, Any]

    @property
    def arms(self) -> list[Arm]:
        return [*self.plain, *self.speculative]


class JsonLines:
    """A child process that answers every line of JSON on its standard input with one on its standard
    output, and sleeps in between.

    Args:
        command: Program and arguments. It speaks first: a line about itself, kept as `greeting`.

    Raises:
        PeerError: the child ended or answered `{"error": ...}`.

    ```pycon
    >>> import sys
    >>> echo = "import sys; print('{}', flush=True)"
    >>> echo += "; [print(line, end='', flush=True) for line in sys.stdin]"
    >>> with JsonLines([sys.executable, "-c", echo], name="echo") as child:
    ...     child.ask({"prompt": [1, 2]})
    {'prompt': [1, 2]}

    ```
    """

    def __init__(self, command: Sequence[str | Path], *, name: str) -> None:
        self._name = name
        self._complaints = tempfile.TemporaryFile("w+")
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            bufsize=1,
        )
        try:
            self.greeting = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: reading reports that, with its last line
            self._child.stdin.write(json.dumps(request) + "\n")
        return self._answer()

    def close(self) -> None:
        """End the child: its input ends, and it with it."""
        try:
            self._child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
        self._complaints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._complaints.seek(0)
            raise PeerError(
                f"{self._name} ended with status {self._child.returncode}: "
                f"{_last_line(self._complaints.read())}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._name}: {answer['error']}")
        return dict(answer)


def run_logged(command: Sequence[str | Path], log: Path, *, what: str) -> None:
    """Run a command with its output in a file.

    Raises:
        PeerError: it failed; quotes the last line of the file and names it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        raise PeerError(f"{what} failed: {_last_line(log.read_text(errors='replace'))} (all of it: {log})")


def _last_line(text: str) -> str:
    return next(
        (line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing"
    )


def transformers_peer(
    target: Path, draft: Path, *, num_tokens: int, assistant_tokens: Sequence[int], temperature: float = 0.0
) -> Peer:
    """Transformers in bf16: eager, compiled over a static cache, assisted."""
    eager, *assisted = transformers_arms(
        target, draft, num_tokens=num_tokens, assistant_tokens=assistant_tokens, temperature=temperature
    )
    return Peer(
        name="transformers",
        plain=[eager, *compiled_arms(target, num_tokens=num_tokens, temperature=temperature)],
        speculative=assisted,
        record={
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "compile_configs": COMPILE_CONFIGS,
        },
    )


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
    target: Path,
    draft: Path,
    *,
    num_tokens: int,
    assistant_tokens: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    num_prompts: int | None = None,
    device: str = "cpu",
    temperature: float = 0.0,
) -> list[Arm]:
    """Eager `generate`, and assisted generation with its defaults and with every constant draft length.

    The constant lengths switch the confidence threshold off, so that k means k; the defaults keep it. Text
    never ends early: no token is the end. Their numerics differ from ours (another order of summation), so
    texts are compared, not asserted.

    Args:
        num_tokens: New tokens per prompt.
        assistant_tokens: The constant draft lengths.
        num_prompts: Rounds in which these arms take part; None in all.
        temperature: Samples above 0, from all tokens, with a seed of the prompt's.
    """
    model = _load(target, dtype, device)
    assistant = _load(draft, dtype, device)
    defaults: dict[str, Any] = {"num_assistant_tokens": None, "assistant_confidence_threshold": None}
    settings = {f"{ASSISTED}, default": defaults}
    for count in assistant_tokens:
        settings[f"{ASSISTED}, k={count}"] = {
            "num_assistant_tokens": count,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }

    def assisted(assistant_settings: dict[str, Any]) -> Callable[[Sequence[int]], Generation]:
        def generate(prompt: Sequence[int]) -> Generation:
            assistant.generation_config = GenerationConfig(
                eos_token_id=None, pad_token_id=0, **assistant_settings
            )
            return _generate(model, prompt, num_tokens, temperature, assistant_model=assistant)

        return generate

    eager = Arm(
        name=EAGER,
        generate=lambda prompt: _generate(model, prompt, num_tokens, temperature),
        exact=False,
        num_prompts=num_prompts,
    )
    return [
        eager,
        *(
            Arm(name=name, generate=assisted(chosen), exact=False, num_prompts=num_prompts)
            for name, chosen in settings.items()
        ),
    ]


def lookup_arms(
    target: Path, *, num_tokens: int, lengths: Sequence[int], text: Callable[[], Sequence[int]]
) -> list[Arm]:
    """Prompt look-up of transformers with every draft length, eager, on a target whose text is given.

    Args:
        text: Prompt and answer of the next generation.
    """
    model = _load(target, torch.bfloat16)

    def given(ids_BL: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        token = text()[min(ids_BL.shape[1], len(text()) - 1)]
        return torch.full_like(scores_BV, -math.inf).index_fill_(1, torch.tensor([token]), 0.0)

    def arm(length: int) -> Arm:
        return Arm(
            name=f"{LOOKUP}, k={length}",
            generate=lambda prompt: _generate(
                model,
                prompt,
                num_tokens,
                0.0,
                prompt_lookup_num_tokens=length,
                logits_processor=transformers.LogitsProcessorList([given]),
            ),
        )

    return [arm(length) for length in lengths]


def compiled_arms(
    target: Path, *, num_tokens: int, dtype: torch.dtype = torch.bfloat16, temperature: float = 0.0
) -> list[Arm]:
    """`generate` with `cache_implementation="static"`, which compiles the forward of one token itself; the
    prompt runs eagerly, as it does there.

    The first prompt compiles, so prompts must be of one length: the static cache is as long as prompt and
    new tokens together."""

    def arm(name: str, settings: Mapping[str, Any]) -> Arm:
        # one each: generate() compiles anew whenever a model's configuration changes
        model = _load(target, dtype)
        config = CompileConfig(dynamic=False, **settings)
        config._compile_all_devices = True  # generate() compiles on a CPU only if this is set
        return Arm(
            name=name,
            generate=lambda prompt: _generate(
                model, prompt, num_tokens, temperature, cache_implementation="static", compile_config=config
            ),
            exact=False,
        )

    return [arm(name, settings) for name, settings in COMPILE_CONFIGS.items()]


def _load(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def _generate(
    model: Any, prompt: Sequence[int], num_tokens: int, temperature: float, **options: Any
) -> Generation:
    arrivals = _Arrivals()
    ids = torch.tensor([list(prompt)], device=model.device)
    if temperature > 0:
        torch.manual_seed(sum(prompt))
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=temperature > 0,
            streamer=arrivals,
            **options,
        )
    total_ms = (time.perf_counter() - start) * 1e3
    return Generation(
        token_ids=out[0, len(prompt) :].tolist(),
        total_ms=total_ms,
        first_ms=(arrivals.times[1] - start) * 1e3,
        first_tokens=arrivals.counts[1],
        target_passes=len(arrivals.counts) - 1,  # prefill emits tokens and is one of them
    )
