"""Two processes, each with a shard of the target, write the text of one process.

The tests use Gloo on a CPU; torchrun starts the processes as for a user.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import two_ranks

from yggdrasil.cli import main
from yggdrasil.pair import LoadedPair

NAME = "tiny-two-ranks"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
VANISHES = """
import os
from yggdrasil.ranks.link import FORWARD, GroupLink, LOAD
link = GroupLink()
while (message := link.message()).kind != FORWARD:
    link.payload()
os._exit(0)
"""
REPORTS_ITS_END = """
import atexit, sys
from yggdrasil.cli import main
atexit.register(print, "the interpreter ends", file=sys.stderr)
sys.exit(main(sys.argv[1:]))
"""
LISTS_ITS_THREADS = """
import sys
from pathlib import Path
from yggdrasil.cli import main
code = main(sys.argv[1:])
names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
print([name for name in names if "gloo" in name], file=sys.stderr)
sys.exit(code)
"""
INTERRUPTED = """
import os, signal, sys, threading
import two_ranks
from yggdrasil.ranks.lead import leading
with leading():
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            two_ranks.written(sys.argv[1], two_ranks.SHAPES["speculative"], two_ranks.SAMPLINGS["greedy"])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_ranks(*commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Start one process per rank and return exit codes and standard error.

    Without torchrun, which would end the other processes when one fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(commands)),
        "OMP_NUM_THREADS": "1",
    }
    shared["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank)},
        )
        for rank, command in enumerate(commands)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.fixture(scope="module")
def compiled(ygg_home: Path, llama_folders: tuple[str, str], kernels: None) -> dict[str, Any]:
    """The pair compiled for two ranks, and the texts that they wrote."""
    done = run(
        *TORCHRUN,
        two_ranks.__file__,
        "compile",
        *llama_folders,
        NAME,
        str(tiny_pair.save_calibration(ygg_home / "stories.txt")),
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def generate(*options: str) -> dict[str, Any]:
    words = (
        "-m",
        "yggdrasil",
        "generate",
        "--pair",
        NAME,
        two_ranks.PROMPTS[0],
        "--max-new-tokens",
        "24",
        "--ignore-eos",
        "--json",
    )
    done = run(*TORCHRUN, *words, *options)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)  # only rank 0 prints
    return report


def test_two_ranks_write_the_texts_of_one_process_with_speculation_and_without(
    compiled: dict[str, Any], tiny: LoadedPair
) -> None:
    alone = {
        kind: two_ranks.written(tiny.bundle.name, two_ranks.SHAPES["plain"], sampling)
        for kind, sampling in two_ranks.SAMPLINGS.items()
    }
    for kind, texts in compiled["texts"].items():
        assert texts["speculative"] == texts["plain"] == alone[kind]


def test_a_rank_has_its_own_heads_and_every_graph_the_same_bits(
    compiled: dict[str, Any], tiny: LoadedPair
) -> None:
    assert compiled["kv_heads"] * 2 == tiny.bundle.kv_target.num_kv_heads
    assert compiled["inexact_widths"] == []


def test_shards_are_those_of_transformers_own_tensor_parallelism(llama_folders: tuple[str, str]) -> None:
    pytest.importorskip(
        "accelerate", reason="transformers shares a model out only where accelerate is installed"
    )
    done = run(*TORCHRUN, two_ranks.__file__, "shards", llama_folders[0])
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("compiled")
def test_torchrun_generate_writes_the_text_of_one_process(
    tiny: LoadedPair, capsys: pytest.CaptureFixture[str]
) -> None:
    report = generate()
    assert (report["ranks"], report["compilations"]) == (2, 0)
    assert (
        main(
            [
                "generate",
                "--pair",
                tiny.bundle.name,
                two_ranks.PROMPTS[0],
                "--max-new-tokens",
                "24",
                "--ignore-eos",
                "--json",
            ]
        )
        == 0
    )
    assert report["text"] == json.loads(capsys.readouterr().out)["text"]


@pytest.mark.usefixtures("compiled")
def test_one_process_refuses_a_pair_for_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--pair", NAME, "Hello"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    command_line = "torchrun --nproc-per-node 2 -m yggdrasil generate ..."
    assert f"compiled for 2 ranks, this run has 1; decode with `{command_line}`" in error


@pytest.mark.usefixtures("compiled")
def test_no_thread_of_the_connection_is_left_at_the_end_of_a_run() -> None:
    """Such a thread may free a tensor while the interpreter ends, which aborts the process."""
    command = ("-c", LISTS_ITS_THREADS, "generate", "--pair", NAME, "Once upon", "--max-new-tokens", "4")
    assert run_ranks(command, command) == [(0, "[]\n"), (0, "[]\n")]


@pytest.mark.usefixtures("compiled")
def test_rank_0_ends_with_one_line_when_another_rank_is_gone() -> None:
    """Also where a thread of the connection would abort the interpreter's end, which thus must not come."""
    words = ("generate", "--pair", NAME, "Once upon", "--max-new-tokens", "24")
    (code, error), _ = run_ranks(("-c", REPORTS_ITS_END, *words), ("-c", VANISHES))
    assert code == 2
    assert error.splitlines()[-1].startswith("ygg generate: rank 0 of 2 lost another rank")


@pytest.mark.usefixtures("compiled")
def test_an_interrupt_of_rank_0_releases_the_others() -> None:
    assert run_ranks(("-c", INTERRUPTED, NAME), ("-m", "yggdrasil", "generate")) == [
        (0, "interrupted\n"),
        (0, ""),
    ]


@pytest.mark.usefixtures("tiny_bundle")
def test_an_error_on_rank_0_releases_the_others_and_is_printed_once() -> None:
    command = ("-m", "yggdrasil", "generate", "--pair", "tiny", "Hello")
    (code, error), other = run_ranks(command, command)
    assert (code, error.count("\n"), other) == (2, 1, (0, ""))
    fix = "run `torchrun --nproc-per-node 2 -m ygg"
    assert (
        f"compiled for 1 process, this run has 2; decode without torchrun, or compile it for 2; {fix}"
        in error
    )
