"""The OpenVINO GenAI end of the peers' claim: reads prompts, decodes, answers. It runs in OpenVINO's own
environment, so nothing of this project is imported.

```
python openvino_child.py TARGET DRAFT THREADS          folders in OpenVINO's format

<- {"versions": {...}, "properties": {...}}           once, when the models are loaded
-> {"pipeline": "paged", "prompt": [5, 7], "num_tokens": 128, "num_assistant_tokens": null,
    "temperature": 0.0}                                on one line
<- {"token_ids": [...], "total_ms": 1.5, "first_ms": 0.5, "target_passes": 128}, or {"error": "..."}
```

Between two lines the process is blocked on its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, TextIO

DISTRIBUTIONS = (
    "openvino",
    "openvino-genai",
    "openvino-tokenizers",
    "optimum-intel",
    "transformers",
    "torch",
)
PAGED = "paged"
SDPA = "sdpa"
SPECULATIVE = "speculative"


def properties(num_threads: int) -> dict[str, Any]:
    """Of every model: one stream, all threads on one prompt, bf16 arithmetic and bf16 keys and values (the
    default stores them in 8 bits).
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }


def pipelines(target: str, draft: str, num_threads: int) -> dict[str, Any]:
    """Plain decoding with either attention backend, and speculative decoding, which has only the paged one
    on CPUs.
    """
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the arms share prompts: each pays for its own prefill
    scheduler.max_num_batched_tokens = 2**31  # as the library chooses for latency
    known = properties(num_threads)
    drafting = openvino_genai.draft_model(draft, "CPU", **known)
    return {
        PAGED: openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **known),
        SDPA: openvino_genai.LLMPipeline(target, "CPU", ATTENTION_BACKEND="SDPA", **known),
        SPECULATIVE: openvino_genai.LLMPipeline(
            target, "CPU", scheduler_config=scheduler, draft_model=drafting, **known
        ),
    }


def greeting(draft: str, num_threads: int) -> dict[str, Any]:
    """Versions, and the properties as the device has understood them."""
    import openvino

    compiled = openvino.Core().compile_model(f"{draft}/openvino_model.xml", "CPU", properties(num_threads))
    understood = {
        name: str(compiled.get_property(name))
        for name in (*properties(num_threads), "NUM_STREAMS", "ENABLE_CPU_PINNING")
    }
    return {"versions": {name: version(name) for name in DISTRIBUTIONS}, "properties": understood}


def decode(pipeline: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Tokens of one prompt, past any end of text; times are this process's own clock around the call.
    Above temperature 0 they are sampled from all tokens, with a seed of the prompt's.
    """
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig(
        max_new_tokens=request["num_tokens"],
        ignore_eos=True,
        do_sample=request["temperature"] > 0,
        apply_chat_template=False,
    )
    if request["temperature"] > 0:
        config.temperature = request["temperature"]
        config.top_p = 1.0
        config.rng_seed = sum(request["prompt"])
    if request["num_assistant_tokens"] is not None:
        config.num_assistant_tokens = request["num_assistant_tokens"]
    ids = np.array([request["prompt"]], dtype=np.int64)
    start = time.perf_counter()
    result = pipeline.generate(
        openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))), config
    )
    total_ms = (time.perf_counter() - start) * 1e3
    tokens = [int(token) for token in result.tokens[0]]
    return {
        "token_ids": tokens,
        "total_ms": total_ms,
        "first_ms": result.perf_metrics.get_ttft().mean,
        "target_passes": _target_passes(result, tokens, is_sampled=request["temperature"] > 0),
    }


def _target_passes(result: Any, tokens: list[int], *, is_sampled: bool) -> int:
    """Forwards of the target, prefill among them: without a draft one a token, else as many as there were
    batches of tokens. Sampled, a batch also counts tokens that were drawn and not emitted.
    """
    extended = result.extended_perf_metrics
    if extended is None:
        return len(tokens)
    emitted = list(extended.main_model_metrics.raw_metrics.m_batch_sizes)
    assert is_sampled or sum(emitted) == len(tokens), "every token was emitted by one forward of the target"
    return len(emitted)


def serve(
    requests: Iterable[str], answers: TextIO, answer: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Answer line by line until the input ends; an exception is an answer too."""
    for line in requests:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(reply), file=answers, flush=True)


def main() -> None:
    """Load, greet, serve."""
    target = sys.argv[1]
    draft = sys.argv[2]
    num_threads = int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    loaded = pipelines(target, draft, num_threads)
    print(json.dumps(greeting(draft, num_threads)), file=answers, flush=True)
    serve(sys.stdin, answers, lambda request: decode(loaded[request["pipeline"]], request))


if __name__ == "__main__":
    main()
