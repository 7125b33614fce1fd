"""The claims of triton_claims.py: in Triton's interpreter everywhere, and compiled where there is a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import triton_claims


@pytest.fixture(scope="module")
def refuted() -> dict[str, str | None]:
    """What the interpreter says of every claim, in a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, triton_claims.__file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", triton_claims.CLAIMS)
def test_in_the_interpreter(name: str, refuted: dict[str, str | None]) -> None:
    assert refuted[name] is None, refuted[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", triton_claims.CLAIMS)
def test_on_a_device(name: str) -> None:
    triton_claims.CLAIMS[name]("cuda")
