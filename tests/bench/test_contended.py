"""What claim_contended starts ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

HOLD = """
import time
from bench.claim_contended import busy_processes
with busy_processes(2):
    print("busy", flush=True)
    time.sleep(60)
"""


def test_busy_processes_end_with_a_claim_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as claim:
        assert claim.stdout is not None
        assert claim.stdout.readline() == "busy\n"
        busy = psutil.Process(claim.pid).children()
        assert len(busy) == 2
        claim.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(process.is_running() and process.status() != "zombie" for process in busy):
        assert time.monotonic() < deadline
        time.sleep(0.05)
