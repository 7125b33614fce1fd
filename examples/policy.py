"""A policy of our own in ten lines: wide trees after a step that accepted little, else chains.

```
python examples/policy.py
```
"""

from __future__ import annotations

from collections.abc import Sequence

from yggdrasil import GenerateConfig, load_pair
from yggdrasil.policy.shape import ShapePolicy
from yggdrasil.state import Row, Shape, StepResult
from yggdrasil.step.choice import VERIFY_ALL, Calibration, Choice

PROMPT = "Once upon a time, there was a little dog named Max."


class Doubting(ShapePolicy):
    """Verifies all nodes of every tree."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.width = 1

    def choose(self, rows: Sequence[Row]) -> Choice:
        shape = Shape(self.width, depth=4)
        return Choice((shape,), (self.calibration,), VERIFY_ALL)

    def observe(self, result: StepResult) -> None:
        self.width = 1 if result.accepted >= 2 else 4


def main() -> None:
    """Print a text that this policy decodes, and its tokens per pass of the target."""
    pair = load_pair()
    policy = Doubting(pair.acceptance.nearest(0.0).calibration)
    prompt = pair.tokenizer.encode(PROMPT)
    results = list(pair.engine.generate(prompt, policy, GenerateConfig(max_new_tokens=64)))
    tokens = [token for result in results for token in result.tokens]
    print(PROMPT + pair.tokenizer.decode(tokens))
    print(f"{len(tokens) / len(results):.2f} tokens per pass")


if __name__ == "__main__":
    main()
