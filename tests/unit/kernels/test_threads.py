"""Threads change no result of an operator, do not spin for long and never hang a caller."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from yggdrasil import get_num_threads, set_num_threads
from yggdrasil.errors import ConfigError
from yggdrasil.kernels.linear import pack_weight
from yggdrasil.kernels.threads import one_torch_thread, stay_alone

pytestmark = pytest.mark.usefixtures("kernels")

# 4 MB: shared out in several tasks a thread
OUT_FEATURES = 2048
IN_FEATURES = 1024
LIMIT_S = 60  # after which a test has failed
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}  # numbers of the system call


@pytest.fixture
def three_threads() -> Iterator[None]:
    """More threads than some machines have cores: then a partner is late now and then."""
    before = get_num_threads()
    set_num_threads(3)
    yield
    set_num_threads(before)


@pytest.fixture(scope="module")
def packed() -> Tensor:
    """A weight."""
    return pack_weight(
        torch.randn(OUT_FEATURES, IN_FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16()
    )


def product(x: Tensor, packed: Tensor) -> Tensor:
    """One operator that is shared out."""
    out: Tensor = torch.ops.ygg.packed_linear(x, packed, None, OUT_FEATURES)
    return out


@pytest.mark.usefixtures("three_threads")
def test_many_threads_return_what_one_thread_returns(packed: Tensor) -> None:
    xs = [torch.randn(rows, IN_FEATURES).bfloat16() for rows in (1, 4, 9, 40)]
    shared = [[product(x, packed) for x in xs] for _ in range(50)]
    set_num_threads(1)
    alone = [product(x, packed) for x in xs]
    assert all(torch.equal(one, other) for each in shared for one, other in zip(each, alone, strict=True))


@pytest.mark.usefixtures("three_threads")
def test_callers_at_the_same_time_each_get_their_own_results(packed: Tensor) -> None:
    xs = [torch.randn(2, IN_FEATURES).bfloat16() for _ in range(4)]
    expected = [product(x, packed) for x in xs]
    wrong: list[int] = []

    def call(caller: int) -> None:
        if not all(torch.equal(product(xs[caller], packed), expected[caller]) for _ in range(100)):
            wrong.append(caller)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(len(xs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


@pytest.mark.usefixtures("three_threads")
def test_partners_sleep_after_an_operator(packed: Tensor) -> None:
    product(torch.randn(1, IN_FEATURES).bfloat16(), packed)
    before = time.process_time()  # of all threads: other processes do not change it
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def passes_in_a_child(test: Callable[..., None], *args: Tensor) -> bool:
    """Whether `test` passes in a forked process, whose pool has no partners yet."""
    child = multiprocessing.get_context("fork").Process(target=test, args=args)
    child.start()
    child.join(timeout=LIMIT_S)
    child.kill()
    return child.exitcode == 0


def _same_product(packed: Tensor, x: Tensor, expected: Tensor) -> None:
    assert torch.equal(product(x, packed), expected)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_computes_too(packed: Tensor) -> None:
    x = torch.randn(2, IN_FEATURES).bfloat16()
    assert passes_in_a_child(_same_product, packed, x, product(x, packed))


def _partners(packed: Tensor, x: Tensor) -> list[int]:
    """The threads that the first operator of this process starts."""
    before = {*os.listdir("/proc/self/task")}
    product(x, packed)
    return [int(thread) for thread in {*os.listdir("/proc/self/task")} - before]


def _partners_leave_the_callers_core(packed: Tensor, x: Tensor, expected: Tensor) -> None:
    cores = os.sched_getaffinity(0)
    partners = _partners(packed, x)
    assert partners

    def call() -> None:
        for core in sorted(cores)[:2]:
            for thread in (threading.get_native_id(), *partners):
                os.sched_setaffinity(thread, {core})
            while any(os.sched_getaffinity(partner) != cores - {core} for partner in partners):
                assert torch.equal(product(x, packed), expected)
                time.sleep(0.001)  # the partners' turn

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()
    last = sorted(cores)[:2][-1]
    assert all(os.sched_getaffinity(partner) == cores - {last} for partner in partners)


def _partners_keep_to_the_process(packed: Tensor, x: Tensor, expected: Tensor) -> None:
    partners = _partners(packed, x)
    core = {min(os.sched_getaffinity(0))}
    for thread in (0, *partners):
        os.sched_setaffinity(thread, core)  # as taskset does
    for _ in range(20):
        assert torch.equal(product(x, packed), expected)
        time.sleep(0.001)
    assert all(os.sched_getaffinity(partner) == core for partner in partners)


def _a_stopped_partner_gets_the_callers_core(packed: Tensor, x: Tensor, expected: Tensor) -> None:
    set_num_threads(2)
    [partner] = _partners(packed, x)
    mine, other = sorted(os.sched_getaffinity(0))[:2]

    def call() -> None:
        os.sched_setaffinity(threading.get_native_id(), {mine})
        while os.sched_getaffinity(partner) != {mine}:  # so the test ends once the partner was moved
            os.sched_setaffinity(partner, {other})
            for _ in range(100):
                assert torch.equal(product(x, packed), expected)

    program = f"import time\nend = time.time() + {LIMIT_S}\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as busy:
        os.sched_setaffinity(busy.pid, {other})
        try:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(call).result()
        finally:
            busy.kill()


def _threads_have_short_slices(packed: Tensor, x: Tensor, _: Tensor) -> None:
    partners = _partners(packed, x)
    time.sleep(0.1)  # until they have asked
    assert {slice_ns(thread) for thread in (threading.get_native_id(), *partners)} == {100_000}
    with subprocess.Popen(["sleep", "10"]) as other:
        assert slice_ns(other.pid) > 100_000
        other.kill()


def slice_ns(thread: int) -> int:
    """The time slice of a thread, as the kernel's sched_getattr returns it."""
    attributes = (ctypes.c_uint64 * 6)()
    number = SCHED_GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, thread, attributes, ctypes.sizeof(attributes), 0) == 0
    return attributes[3]


def num_cores() -> int:
    """Cores that this process may use; 1 where threads cannot be kept off a core."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


@pytest.mark.skipif(num_cores() == 1, reason="no other core, or none that has a number")
@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("test", (_partners_leave_the_callers_core, _partners_keep_to_the_process))
def test_a_partner_never_takes_the_callers_core(test: Callable[..., None], packed: Tensor) -> None:
    x = torch.randn(2, IN_FEATURES).bfloat16()
    assert passes_in_a_child(test, packed, x, product(x, packed))


@pytest.mark.skipif(num_cores() == 1, reason="no other core, or none that has a number")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_partner_that_lost_its_core_in_a_task_gets_the_callers(packed: Tensor) -> None:
    x = torch.randn(8, IN_FEATURES).bfloat16()
    assert passes_in_a_child(_a_stopped_partner_gets_the_callers_core, packed, x, product(x, packed))


def has_slices() -> bool:
    """Whether this kernel has a time slice for every thread: Linux 6.12."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    is_known = sys.platform == "linux" and platform.machine() in SCHED_GETATTR
    return is_known and version is not None and tuple(map(int, version.groups())) >= (6, 12)


@pytest.mark.skipif(not has_slices(), reason="one time slice for all before Linux 6.12")
@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_threads_of_a_call_ask_for_short_time_slices(packed: Tensor) -> None:
    x = torch.randn(2, IN_FEATURES).bfloat16()
    assert passes_in_a_child(_threads_have_short_slices, packed, x, x)


@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_stays_alone_leaves_torch_and_others_their_threads(packed: Tensor) -> None:
    x = torch.randn(2, IN_FEATURES).bfloat16()
    seen = []

    def work() -> None:
        stay_alone()
        seen.append(torch.get_num_threads())
        seen.append(torch.equal(product(x, packed), expected))

    expected = product(x, packed)
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [1, True]
    assert get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_torch_has_one_thread_within_a_step_and_its_own_number_after_it() -> None:
    with pytest.raises(KeyError), one_torch_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == get_num_threads() == 3


@pytest.mark.parametrize("count", (0, -1, 257))
def test_an_impossible_number_of_threads_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"threads: {count} is not allowed; it must be from 1 to 256"):
        set_num_threads(count)
