"""Target tokens: filters by hand, noise keyed by seed and position, rows that are independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.kernels.filters import beyond_top_p_in_integers
from yggdrasil.state import DecodeState, Row
from yggdrasil.step import sampling as sampling_module
from yggdrasil.step.accept import Accepted, accept, choose_rows, follow
from yggdrasil.step.prune import Pruned
from yggdrasil.step.sampling import BROKEN, choose_tokens, draw_noise, gumbel_noise, process_logits
from yggdrasil.tree import TokenTree

PROBABILITIES = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
LOGITS = PROBABILITIES.log()


def next_tokens(logits_KV: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> list[int]:
    """The target's own token after every node, given the position of that token.

    Raises:
        YggError: logits that are not finite.
    """
    distinct = [*dict.fromkeys(positions)]
    place_K = torch.tensor([distinct.index(position) for position in positions], device=logits_KV.device)
    chosen = choose_tokens(logits_KV, distinct, place_K, sampling)
    if not chosen.score_K.isfinite().all():
        raise YggError(BROKEN)
    return chosen.token_K.tolist()


def kept(sampling: SamplingConfig) -> list[int]:
    """Tokens that are still possible."""
    return torch.nonzero(process_logits(LOGITS, sampling)[0].isfinite())[:, 0].tolist()


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.01}, [1]),  # the most likely token is always kept
        ({"top_p": 0.45}, [1]),
        ({"top_p": 0.7}, [1, 3]),  # 0.5 is not enough, 0.8 is
        ({"top_p": 0.9}, [0, 1, 3]),
        ({"min_p": 0.25}, [0, 1, 3]),  # at least 0.125
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # the more likely of the two has 0.625
        ({"top_p": 0.9, "min_p": 0.5}, [1, 3]),
    ],
)
def test_filters_keep_the_tokens_computed_by_hand(options: dict[str, float], tokens: list[int]) -> None:
    assert kept(SamplingConfig(temperature=1.0, **options)) == tokens


def test_kept_probabilities_are_only_renormalised() -> None:
    processed = process_logits(LOGITS, SamplingConfig(temperature=1.0, top_k=2)).softmax(dim=-1)
    torch.testing.assert_close(processed, torch.tensor([[0.0, 0.625, 0.0, 0.375]]))


def test_temperature_divides_the_logits_before_the_filters() -> None:
    torch.testing.assert_close(process_logits(LOGITS, SamplingConfig(temperature=0.5)), LOGITS * 2)
    # nearly uniform: three tokens reach 0.7
    assert kept(SamplingConfig(temperature=100.0, top_p=0.7)) == [0, 1, 3]


def test_noise_is_a_function_of_seed_and_position() -> None:
    noise = gumbel_noise(3, 7, 50).clone()
    gumbel_noise.cache_clear()
    assert torch.equal(gumbel_noise(3, 7, 50), noise)
    assert not torch.equal(gumbel_noise(3, 8, 50), noise)
    assert not torch.equal(gumbel_noise(4, 7, 50), noise)
    assert gumbel_noise(2**63 - 1, 2**20, 50).isfinite().all()


def test_noise_is_standard_gumbel() -> None:
    noise = torch.stack([gumbel_noise(0, position, 1000) for position in range(200)]).double()
    deviation = math.pi / math.sqrt(6)
    assert abs(noise.mean().item() - 0.577216) < 5 * deviation / math.sqrt(noise.numel())
    assert abs((noise < 1.0).double().mean().item() - math.exp(-math.exp(-1.0))) < 5 * 0.5 / math.sqrt(
        noise.numel()
    )


def test_greedy_takes_the_argmax_and_the_first_among_equals() -> None:
    logits_KV = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0], [-torch.inf, -torch.inf, -5.0]])
    assert next_tokens(logits_KV, range(3), SamplingConfig()) == [1, 0, 2]


def test_a_sample_is_the_argmax_of_logits_and_the_noise_of_its_position() -> None:
    logits_KV = torch.randn(4, 30)
    positions_K = torch.tensor([5, 9, 5, 6])
    expected = [
        int((row / 0.7 + gumbel_noise(11, position, 30)).argmax())
        for row, position in zip(logits_KV, positions_K.tolist(), strict=True)
    ]
    assert (
        next_tokens(logits_KV, positions_K.tolist(), SamplingConfig(temperature=0.7, seed=11)) == expected
    )


def test_a_token_that_is_filtered_is_never_sampled() -> None:
    positions = torch.arange(500)
    chosen = next_tokens(
        LOGITS.expand(500, -1), positions.tolist(), SamplingConfig(temperature=1.0, top_p=0.7)
    )
    assert set(chosen) == {1, 3}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 0.5, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_logits_that_are_not_finite_are_refused(value: float, options: dict[str, float]) -> None:
    logits_KV = torch.randn(3, 8)
    logits_KV[1, 4] = value
    with pytest.raises(YggError, match="not finite"):
        next_tokens(logits_KV, range(3), SamplingConfig(**options))


def test_a_row_without_any_possible_token_is_refused() -> None:
    with pytest.raises(YggError, match="not finite"):
        next_tokens(torch.full((1, 4), -torch.inf), [0], SamplingConfig())


ON_A_DEVICE = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ("cpu", ON_A_DEVICE))
@pytest.mark.parametrize("vocab", (1003, 32000, 50257))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rows_are_bitwise_independent_of_each_other_and_of_their_number(
    dtype: torch.dtype, vocab: int, device: str
) -> None:
    logits_KV = (torch.randn(17, vocab) * 3).to(dtype).to(device)
    sampling = SamplingConfig(temperature=0.8, top_k=200, top_p=0.9, min_p=0.01, seed=5)
    together = process_logits(logits_KV.float(), sampling)
    positions = torch.arange(40, 57)
    chosen = next_tokens(logits_KV, positions.tolist(), sampling)
    for rows in (slice(0, 1), slice(3, 5), slice(4, 12), slice(4, 16), slice(16, 17)):
        assert torch.equal(process_logits(logits_KV[rows].float(), sampling), together[rows])
        assert next_tokens(logits_KV[rows], positions[rows].tolist(), sampling) == chosen[rows]


@pytest.mark.parametrize("top_p", (0.01, 0.45, 0.7, 0.9, 0.96))
def test_integer_top_p_filters_the_same_tokens_as_probabilities(top_p: float) -> None:
    ordered_KV = (
        torch.cat((LOGITS.sort(descending=True).values.repeat(1, 8), -torch.inf * torch.ones(1, 8)), dim=1)
        .sort(descending=True)
        .values
    )
    assert ordered_KV[0].isfinite().sum() == 32
    for rows_KV in (
        LOGITS.sort(descending=True).values,
        ordered_KV,
        (torch.randn(50, 1003) * 3).sort(dim=-1, descending=True).values,
    ):
        probability_KV = rows_KV.double().softmax(dim=-1)
        assert torch.equal(
            beyond_top_p_in_integers(rows_KV, top_p),
            probability_KV.cumsum(dim=-1) - probability_KV >= top_p,
        )


class Sums(TorchDispatchMode):
    """Records every sum: the operator and the dtype. Our operators run in the form of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "ygg":
            with self:
                return func._op_dk(DispatchKey.CUDA, *args, **(kwargs or {}))
        if "sum" in name or "softmax" in name:
            self.seen.append((name, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_a_device_sums_only_integers() -> None:
    with Sums() as sums:
        process_logits(
            torch.empty(3, 50, device="meta"),
            SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
        )
    assert sums.seen == [("cumsum", torch.int64)]


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_integer_top_p_does_not_filter_a_broken_row(value: float) -> None:
    assert not beyond_top_p_in_integers(torch.full((1, 9), value), 0.5).any()
    assert not beyond_top_p_in_integers(torch.tensor([[value, 2.0, 1.0]]), 0.5).any()


TREE = TokenTree.root(3, 8)
TREE.grow(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([-0.1, -0.2]))
TREE.grow(torch.tensor([1, 1, 2]), torch.tensor([1, 2, 1]), torch.tensor([-0.3, -0.4, -0.5]))


def pruned_chain(*tokens: int) -> Pruned:
    """A verified chain of these draft tokens."""
    tree = TokenTree.root(0, 1 + len(tokens))
    for parent, token in enumerate(tokens):
        tree.grow(torch.tensor([parent]), torch.tensor([token]), torch.tensor([-0.1 * (parent + 1)]))
    return Pruned(tree, [*range(len(tree))], [*range(len(tree))], 1.0)


def accept_row(row: Row, pruned: Pruned, logits_KV: Tensor) -> Accepted:
    """What a step over this row alone accepts."""
    [accepted] = follow([pruned.tree], choose_rows([row], [pruned], logits_KV, [0]))
    assert isinstance(accepted, Accepted)
    return accepted


FILTERS = ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9, "min_p": 0.05})


@pytest.mark.parametrize("options", FILTERS)
def test_a_tree_is_followed_along_the_target_tokens(options: dict[str, float]) -> None:
    lens = set()
    for seed in range(40):
        sampling = SamplingConfig(temperature=0.9, seed=seed, **options)
        logits_KV = torch.randn(len(TREE), 5)
        chosen = next_tokens(logits_KV, (71 + TREE.depth_N).tolist(), sampling)
        path = TREE.walk(torch.tensor(chosen))
        accepted = accept(TREE, logits_KV, 70, sampling)
        assert accepted == Accepted(path, [chosen[node] for node in path])
        lens.add(len(path))
    assert lens == {1, 2, 3}


@pytest.mark.parametrize("options", FILTERS)
def test_a_row_of_a_batch_accepts_the_same_as_a_tree(options: dict[str, float]) -> None:
    lens = set()
    for seed in range(40):
        sampling = SamplingConfig(temperature=0.9, seed=seed, **options)
        logits_KV = torch.randn(4, 5)
        row = Row(0, DecodeState([0] * 71, sampling))
        accepted = accept_row(row, pruned_chain(1, 2, 1), logits_KV)
        chosen = next_tokens(logits_KV, range(71, 75), sampling)
        kept = next((place for place, token in enumerate([1, 2, 1]) if token != chosen[place]), 3)
        assert accepted == Accepted(list(range(kept + 1)), chosen[: kept + 1])
        lens.add(kept)
    assert {0, 1, 2} <= lens


def test_noise_is_drawn_once_for_every_position_that_a_tree_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(
        sampling_module,
        "draw_noise",
        lambda seed, position, vocab: drawn.append(position) or draw_noise(seed, position, vocab),
    )
    gumbel_noise.cache_clear()
    logits_KV = torch.zeros(len(TREE), 5)
    for node, token in ((0, 2), (2, 4)):  # node 2 is on the path, its child is not
        logits_KV[node, token] = 1e4
    sampling = SamplingConfig(temperature=1.0)
    assert accept(TREE, logits_KV, 70, sampling).path == [0, 2]
    assert drawn == [71, 72, 73]
    row = Row(0, DecodeState([0] * 71, sampling))
    assert accept_row(row, pruned_chain(1, 2, 3, 4), logits_KV[:5]).path == [0]
    assert drawn == [71, 72, 73, 74, 75]


@pytest.mark.parametrize("temperature", (1e-30, 9.9e-31, 1e-38, 1e-45, 5e-324, 1e38, 1e300))
@pytest.mark.parametrize("options", ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}), ids=str)
def test_scores_are_finite_at_any_temperature_and_a_tiny_one_is_greedy(
    temperature: float, options: dict[str, Any]
) -> None:
    logits_KV = torch.randn(6, 50) * 20
    chosen = next_tokens(logits_KV, range(6), SamplingConfig(temperature=temperature, seed=3, **options))
    if temperature < 1:
        assert chosen == next_tokens(logits_KV, (), SamplingConfig())


def test_a_tiny_temperature_samples_among_equal_logits() -> None:
    logits_KV = torch.tensor([[1e4, -3.0, 1e4, torch.finfo(torch.float32).min]]).expand(200, -1)
    assert set(next_tokens(logits_KV, range(200), SamplingConfig(temperature=1e-38))) == {0, 2}
