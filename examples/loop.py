"""The paper's loop in ten lines: a tree that the draft grows and the target verifies.

```
python examples/loop.py
```
"""

from __future__ import annotations

from yggdrasil import Pair, SamplingConfig, Shape, load_pair
from yggdrasil.state import truncate

PROMPT = "Once upon a time, there was a little dog named Max."


def decode(pair: Pair, prompt: str, num_tokens: int, sampling: SamplingConfig) -> list[int]:
    """The first tokens of the target's own text after a prompt."""
    tree = pair.tree(prompt, sampling)
    ends = pair.engine.eos_tokens
    tokens: list[int] = []
    while len(tokens) < num_tokens and ends.isdisjoint(tokens):
        tree.grow_with(pair.engine.draft, Shape(width=4, depth=4))
        tree.prune_(8)
        tokens += tree.verify_with(pair.engine.target)
    return truncate(tokens, room=num_tokens, eos_tokens=ends)


def main() -> None:
    """Print a greedy text and a sampled one."""
    pair = load_pair()
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, seed=7)):
        print(PROMPT + pair.tokenizer.decode(decode(pair, PROMPT, 64, sampling)))


if __name__ == "__main__":
    main()
