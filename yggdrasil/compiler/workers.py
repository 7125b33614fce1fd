"""Build the graphs of a menu in worker processes: `python -m yggdrasil.compiler.workers` is one worker.

A worker reads a job a line from standard input, builds it, and answers with a line; it keeps its model, of
which it has no weights, so the imports and the model take time once. The parent hands jobs out one at a
time, so the workers finish together.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from yggdrasil.compiler.graphs import compile_graph
from yggdrasil.compiler.weights import load_weights
from yggdrasil.kernels import load_cuda_kernels, load_kernels
from yggdrasil.kernels.compilations import count_compilation
from yggdrasil.kv import KVShape, KVStorage
from yggdrasil.models.forward import DraftForward, TargetForward
from yggdrasil.models.load import order_linears_, outline_model
from yggdrasil.models.packing import empty_meta
from yggdrasil.store import storage

__all__ = ["GraphJob", "compile_graphs", "run_job"]

GROWTH_TOKENS = 8  # graphs of a draft up to this size run many times a step


@dataclass(frozen=True)
class GraphJob:
    """One graph to build.

    Args:
        model: Folder or hub id.
        weights: Folder of its packed weights.
        num_candidates: C of a draft; 0 for a target.
        dtype: "bfloat16" or "float32".
        max_depth: Longest tree path.
        exact: Whether linear layers on CUDA have one order of summation; on a CPU they have.
        ranks: Number of shards of the model; the graph fits any of them.
    """

    model: str
    weights: str
    num_candidates: int
    vocab: int
    dtype: str
    device: str
    kv: KVShape
    max_depth: int
    num_tokens: int
    path: str
    exact: bool = True
    ranks: int = 1


@lru_cache(maxsize=2)
def _module(
    model: str,
    weights: str,
    num_candidates: int,
    vocab: int,
    dtype: str,
    device: str,
    kv: KVShape,
    exact: bool,
    ranks: int,
) -> torch.nn.Module:
    load_kernels()
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in load_weights(Path(weights), device, command="").items()
    }
    loaded = outline_model(model, stored, dtype=getattr(torch, dtype), ranks=ranks)
    if device == "cuda":
        load_cuda_kernels()
        if exact:
            order_linears_(loaded)
    # Graphs depend on the strides of a page and on how many pages a row may have, not on how many there
    # are: two will do.
    pages_BP = torch.zeros(1, kv.num_pages, dtype=torch.int32, device=device)
    cache = KVStorage(kv, num_pages=2, pages_BP=pages_BP, dtype=getattr(torch, dtype), device=device)
    module = (
        DraftForward(loaded, cache, vocab, num_candidates)
        if num_candidates
        else TargetForward(loaded, cache, vocab)
    )
    return module.to(device).eval()


def run_job(job: GraphJob) -> None:
    """Build one graph in this process; the package appears whole or not at all."""
    module = _module(
        job.model,
        job.weights,
        job.num_candidates,
        job.vocab,
        job.dtype,
        job.device,
        job.kv,
        job.exact,
        job.ranks,
    )
    path = Path(job.path)
    with storage.temporary_folder(path.parent, path.name) as folder:
        temporary = folder / path.name
        meta_NM = empty_meta(job.num_tokens, job.max_depth, device=job.device)
        is_small = job.num_candidates > 0 and job.num_tokens <= GROWTH_TOKENS
        compile_graph(module, meta_NM, temporary, exact=job.exact, is_small=is_small)
        storage.put(temporary, path)


def compile_graphs(
    jobs: Sequence[GraphJob], *, num_workers: int, on_done: Callable[[GraphJob], None]
) -> None:
    """Build every job, `num_workers` at a time.

    Args:
        jobs: Graphs; those whose package exists are the caller's to leave out.
        on_done: Called from a thread after each.

    Raises:
        RuntimeError: a worker failed; its traceback is in the message. The packages that were done stay.
    """
    for _ in jobs:
        count_compilation()
    workers = [_Worker() for _ in range(min(num_workers, len(jobs)))]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def build(job: GraphJob) -> None:
        worker = idle.get()
        try:
            worker.build(job)
        finally:
            idle.put(worker)
        on_done(job)

    threads = ThreadPoolExecutor(max_workers=max(1, len(workers)))
    try:
        for future in as_completed([threads.submit(build, job) for job in jobs]):
            future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # after Ctrl-C or a failure the builds under way end here
            worker.kill()
        threads.shutdown()
        for worker in workers:
            worker.close()
        # a killed worker cannot clean up after itself
        storage.sweep({Path(job.path).parent for job in jobs}, older_than_s=0)


class _Worker:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "yggdrasil.compiler.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def build(self, job: GraphJob) -> None:
        """Raises RuntimeError with the worker's errors if it could not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.startswith("done"):
            raise RuntimeError(
                f"the graph of {job.num_tokens} tokens of {job.model} could not be built:\n{self._stderr()}"
            )

    def _stderr(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def kill(self) -> None:
        """End the process; a thread that waits for its answer reads the end of the stream."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close its streams, once no thread reads any more."""
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _serve() -> None:
    """The worker: one job a line on standard input, `done` a line on standard output, which nothing else
    may write.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Inductor builds the thread count into its own loops, which are short compared with our operators; and
    # a
    # reduction that is split
    # over threads for some token counts and not for others would cost the equality of bits between them.
    torch.set_num_threads(1)
    for line in sys.stdin:
        payload = json.loads(line)
        run_job(GraphJob(**{**payload, "kv": KVShape(**payload["kv"])}))
        answers.write("done\n")


if __name__ == "__main__":
    _serve()
