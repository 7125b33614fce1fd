"""Decodes prompts for `claim_contended`, in a process of its own, with the package of whatever checkout is
first in PYTHONPATH.

A line of standard input is a prompt's text, as JSON; a line of standard output is what decoding it took.
"""

from __future__ import annotations

import json
import sys
import time

from yggdrasil import GenerateConfig, load_pair


def main(name: str, num_tokens: int) -> None:
    """Answer until standard input ends; the first line reports that the pair is loaded."""
    pair = load_pair(name)
    config = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        prompt = pair.tokenizer.encode(json.loads(line))
        start = time.perf_counter()
        # a new policy, as every request has one
        results = list(pair.engine.generate(prompt, pair.policy(), config))
        ms = (time.perf_counter() - start) * 1e3
        print(
            json.dumps({"ms": ms, "tokens": [token for result in results for token in result.tokens]}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
