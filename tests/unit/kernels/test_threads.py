"""Threads change no result of an operator, do not spin for long and never hang a caller."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

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


def _in_a_child(packed: Tensor, x: Tensor, expected: Tensor) -> None:
    assert torch.equal(product(x, packed), expected)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_computes_too(packed: Tensor) -> None:
    x = torch.randn(2, IN_FEATURES).bfloat16()
    child = multiprocessing.get_context("fork").Process(
        target=_in_a_child, args=(packed, x, product(x, packed))
    )
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0


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
