"""Inflate and compile what the claims measure, so that none of them spends its time on it.

```
python -m bench.prepare [pair|twin|inexact] [--device cuda --llama-7b]
```

What was finished before an interruption is kept.
"""

from __future__ import annotations

import argparse

from bench.lib.subject import Subject, add_options, subject
from bench.lib.workloads import WORKLOADS
from yggdrasil.pair import LoadedPair

COUNTED_ON = ("stories", "wiki")  # the kinds of text on which structures are counted


def built(under_test: Subject, what: str) -> list[LoadedPair]:
    """The pairs that a part of the claims needs."""
    if what == "pair":
        return [under_test.pair()]
    if what == "inexact":
        return [under_test.inexact()]
    return [
        pair
        for name in COUNTED_ON
        for pair in (under_test.twin(WORKLOADS[name]), under_test.pair(WORKLOADS[name]))
    ]


def main() -> None:
    """Build and report what there is."""
    parser = argparse.ArgumentParser(
        prog="bench.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("pair", "twin", "inexact"),
        default="pair",
        help="see gpu.sh (default: %(default)s)",
    )
    add_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="changes nothing here; a series of claims is rehearsed with it"
    )
    options = parser.parse_args()
    under_test = subject(options)
    print(under_test.target.statement, flush=True)
    for pair in built(under_test, options.what):
        print(
            f"{pair.bundle.name}, calibrated on {pair.dataset}: {pair.bundle.exactness}; "
            f"{pair.bundle.folder}"
        )


if __name__ == "__main__":
    main()
