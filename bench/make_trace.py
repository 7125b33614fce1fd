"""Write the arrivals that `claim_serving` replays: the part of a production trace with the most changing
rate, thinned.

```
python -m bench.make_trace AzureLLMInferenceTrace_conv.csv [--out FILE]
```

Every THINNING-th request of seconds FIRST_S to LAST_S, as seconds since the first and the lengths as they
were. In this part the rate more than doubles and falls back again. Source: AzureLLMInferenceDataset 2023
(Azure/AzurePublicDataset on GitHub), CC BY 4.0."""

from __future__ import annotations

import argparse
import csv
from datetime import datetime
from pathlib import Path

__all__ = ["TRACE", "TraceRequest", "read_trace"]

TRACE = Path(__file__).parent / "data" / "azure_conv.csv"
FIRST_S = 700.0
LAST_S = 3450.0
THINNING = 12

TraceRequest = tuple[float, int, int]
"""Seconds since the first request, tokens of its prompt, tokens of its output."""


def read_trace(path: Path = TRACE) -> list[TraceRequest]:
    """The thinned trace."""
    with path.open() as file:
        return [
            (float(row["arrival_s"]), int(row["context_tokens"]), int(row["generated_tokens"]))
            for row in csv.DictReader(file)
        ]


def thinned(path: Path) -> list[TraceRequest]:
    """From the published file."""
    with path.open() as file:
        rows = [
            (_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]
    start = rows[0][0]
    part = [row for row in rows if FIRST_S <= row[0] - start < LAST_S][::THINNING]
    return [(round(arrival - part[0][0], 3), context, generated) for arrival, context, generated in part]


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp[:26]).timestamp()


def main() -> None:
    """Read, thin, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=TRACE)
    options = parser.parse_args()
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arrival_s", "context_tokens", "generated_tokens"))
        writer.writerows(thinned(options.trace))


if __name__ == "__main__":
    main()
