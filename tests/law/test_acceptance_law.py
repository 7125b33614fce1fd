"""The acceptance law: with any verified tree, the text is the target's own.

The target is a function from a text to logits over a vocabulary of three. A step verifies a tree after the
text so far and emits the tokens of `accept`; plain decoding is the same with a tree of one node. Both must
write the same tokens for every seed, and the first token must have the distribution of the softmax.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, product

import pytest
import torch
from scipy import stats
from torch import Tensor

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import YggError
from yggdrasil.step.accept import accept
from yggdrasil.step.sampling import process_logits
from yggdrasil.tree import TokenTree

pytestmark = pytest.mark.usefixtures("kernels")  # the argmax over logits is a kernel

VOCAB = 3
PROMPT = (0,)
Target = Callable[[tuple[int, ...]], Tensor]
Nested = dict[int, "Nested"]  # a tree shape: children by token


def nested_shapes(depth: int) -> list[Nested]:
    """All trees of at most `depth` levels: each node has any subset of the tokens as children."""
    if depth == 0:
        return [{}]
    below = nested_shapes(depth - 1)
    subsets = [chosen for size in range(VOCAB + 1) for chosen in combinations(range(VOCAB), size)]
    return [
        dict(zip(chosen, children, strict=True))
        for chosen in subsets
        for children in product(below, repeat=len(chosen))
    ]


def tree_of(shape: Nested, root_token: int) -> tuple[TokenTree, list[tuple[int, ...]]]:
    """The tree, grown level by level like a draft, and each node's tokens after the root."""
    nodes: list[tuple[int, Nested, tuple[int, ...]]] = [(-1, shape, ())]
    for node, (_, children, text) in enumerate(nodes):  # the list grows during the loop
        nodes.extend((node, below, (*text, token)) for token, below in children.items())
    tree = TokenTree.root(root_token, len(nodes), max_depth=3)
    if len(nodes) > 1:
        parents = [parent for parent, _, _ in nodes[1:]]
        texts = [text for _, _, text in nodes[1:]]
        for level in range(1, 4):
            at = [i for i, text in enumerate(texts) if len(text) == level]
            if at:
                tree.grow(
                    torch.tensor([parents[i] for i in at]),
                    torch.tensor([texts[i][-1] for i in at]),
                    torch.full((len(at),), -float(level)),
                )
    return tree, [text for _, _, text in nodes]


def step(target: Target, text: tuple[int, ...], shape: Nested, sampling: SamplingConfig) -> tuple[int, ...]:
    """The tokens that one speculative step emits after `text`."""
    tree, texts = tree_of(shape, text[-1])
    logits_KV = torch.stack([target((*text, *after)) for after in texts])
    return tuple(accept(tree, logits_KV, len(text) - 1, sampling).tokens)


def decode(
    target: Target, length: int, sampling: SamplingConfig, shapes: Iterator[Nested]
) -> tuple[int, ...]:
    """`length` tokens after the prompt, one shape a step."""
    text = PROMPT
    while len(text) < len(PROMPT) + length:
        text += step(target, text, next(shapes), sampling)
    return text[len(PROMPT) : len(PROMPT) + length]


def plain(target: Target, length: int, sampling: SamplingConfig) -> tuple[int, ...]:
    return decode(target, length, sampling, iter(lambda: {}, None))


def scripted(kind: str, seed: int) -> Target:
    """Logits by text: random; one-hot; with a token of probability 0; with ties; or any of these."""

    @cache
    def logits(text: tuple[int, ...]) -> Tensor:
        rng = random.Random(f"{kind} {seed} {text}")
        row = torch.tensor([rng.gauss(0, 1.5) for _ in range(VOCAB)])
        chosen = kind if kind != "mixed" else rng.choice(("random", "one-hot", "zero", "ties"))
        if chosen == "one-hot":
            likely = rng.randrange(VOCAB)
            row[torch.arange(VOCAB) != likely] = -torch.inf
        elif chosen == "zero":
            row[rng.randrange(VOCAB)] = -torch.inf
        elif chosen == "ties":
            row = torch.tensor(rng.choice(((0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (0.0, 1.0, 1.0))))
        return row

    return logits


KINDS = ("random", "one-hot", "zero", "ties", "mixed")


def level_shapes() -> list[Nested]:
    """Shapes up to depth 3 whose nodes of a level have the same children: 8 subsets at each level.

    There are 730**3 shapes up to depth 3. The law can depend only on the children of the nodes on the walk,
    and all combinations of those along three levels, after every text, are among these shapes.
    """
    subsets = [chosen for size in range(VOCAB + 1) for chosen in combinations(range(VOCAB), size)]
    return [
        {a: {b: {c: {} for c in third} for b in second} for a in first}
        for first, second, third in product(subsets, repeat=3)
    ]


def random_shape(rng: random.Random, depth: int = 3) -> Nested:
    """Any of the 730**3 shapes."""
    return {token: random_shape(rng, depth - 1) for token in range(VOCAB) if depth and rng.random() < 0.6}


def uneven_shapes() -> list[Nested]:
    rng = random.Random(0)
    return [random_shape(rng) for _ in range(150)]


SHAPES = {
    "all to depth 2": nested_shapes(2),
    "all levels to depth 3": level_shapes(),
    "any to depth 3": uneven_shapes(),
}
SAMPLINGS = [SamplingConfig(), *(SamplingConfig(temperature=0.9, seed=seed) for seed in range(3))]


def test_all_shapes_are_generated() -> None:
    assert {name: len(shapes) for name, shapes in SHAPES.items()} == {
        "all to depth 2": 729,
        "all levels to depth 3": 512,
        "any to depth 3": 150,
    }
    assert all(tree_of(shape, 0)[0].check() is None for shape in SHAPES["any to depth 3"])


@pytest.mark.parametrize("kind", ("mixed", "ties"))
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_step_emits_the_tokens_of_plain_decoding_as_far_as_the_tree_has_them(
    shapes: str, kind: str
) -> None:
    target = scripted(kind, 0)
    expected = [plain(target, 4, sampling) for sampling in SAMPLINGS]
    for shape in SHAPES[shapes]:
        tree, texts = tree_of(shape, PROMPT[-1])
        logits_KV = torch.stack([target((*PROMPT, *after)) for after in texts])
        for sampling, text in zip(SAMPLINGS, expected, strict=True):
            held = max(len(after) for after in texts if text[: len(after)] == after)
            assert tuple(accept(tree, logits_KV, len(PROMPT) - 1, sampling).tokens) == text[: held + 1], (
                f"shape {shape}, seed {sampling.seed}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_trees_writes_the_plain_text_for_every_seed(kind: str) -> None:
    rng = random.Random(1)
    for seed in range(15):
        target = scripted(kind, seed)
        for sampling in (
            SamplingConfig(),
            SamplingConfig(temperature=1.1, seed=seed),
            SamplingConfig(temperature=0.7, top_p=0.8, seed=seed),
        ):
            assert decode(target, 9, sampling, iter(lambda: random_shape(rng), None)) == plain(
                target, 9, sampling
            )


def exact_pairs(target: Target, sampling: SamplingConfig) -> dict[tuple[int, int], float]:
    """The probability of the first two tokens."""

    def row(text: tuple[int, ...]) -> Sequence[float]:
        return process_logits(target(text)[None], sampling).double().softmax(dim=-1)[0].tolist()

    return {(a, b): row(PROMPT)[a] * row((*PROMPT, a))[b] for a in range(VOCAB) for b in range(VOCAB)}


Sampler = Callable[[TokenTree, Tensor, SamplingConfig], tuple[int, ...]]
NUM_SEEDS = 4000
MIN_PVALUE = 1e-6  # probability that a correct sampler fails
LAWS = [
    ("random", {"temperature": 0.8}),
    ("zero", {"temperature": 1.5, "min_p": 0.05}),
    ("ties", {"temperature": 1.0, "top_p": 0.9}),
]


def sound(tree: TokenTree, logits_KV: Tensor, sampling: SamplingConfig) -> tuple[int, ...]:
    return tuple(accept(tree, logits_KV, len(PROMPT) - 1, sampling).tokens)


def trusting(tree: TokenTree, logits_KV: Tensor, sampling: SamplingConfig) -> tuple[int, ...]:
    """A wrong sampler: it always takes the root's first child for one seed in three."""
    if sampling.seed % 3 == 0 and len(tree) > 1:
        return (int(tree.token_N[1]),)
    return sound(tree, logits_KV, sampling)


def count_pairs(target: Target, options: dict[str, float], sampler: Sampler) -> Counter[tuple[int, int]]:
    """Counts of the first two tokens over all seeds, cycling through the trees."""
    rng = random.Random(2)
    counts = Counter[tuple[int, int]]()
    trees = [
        (tree, torch.stack([target((*PROMPT, *after)) for after in texts]))
        for tree, texts in (tree_of(random_shape(rng), 0) for _ in range(40))
    ]
    for seed in range(NUM_SEEDS):
        sampling = SamplingConfig(**options, seed=seed)
        tokens = sampler(*trees[seed % len(trees)], sampling)
        tokens = tokens if len(tokens) > 1 else tokens + step(target, PROMPT + tokens, {}, sampling)
        counts[tokens[0], tokens[1]] += 1
    return counts


def pvalue(counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> float:
    """P-value of the chi-square statistic; 0 if a pair of tokens with probability zero was written."""
    possible = [pair for pair, probability in expected.items() if probability > 0]
    if sum(counts[pair] for pair in possible) < NUM_SEEDS:
        return 0.0
    if len(possible) == 1:
        return 1.0
    return float(
        stats.chisquare(
            [counts[pair] for pair in possible],
            [expected[pair] * NUM_SEEDS for pair in possible],
            sum_check=False,
        ).pvalue
    )


@pytest.mark.parametrize(("kind", "options"), LAWS)
def test_tree_sampling_preserves_the_target_s_distribution(kind: str, options: dict[str, float]) -> None:
    """Chi-square of the first two tokens over 4000 seeds; a correct sampler fails with probability 1e-6."""
    target = scripted(kind, 3)
    assert (
        pvalue(count_pairs(target, options, sound), exact_pairs(target, SamplingConfig(**options)))
        > MIN_PVALUE
    )


@pytest.mark.parametrize(("kind", "options"), LAWS)
def test_the_statistic_notices_a_sampler_that_trusts_the_draft_one_time_in_three(
    kind: str, options: dict[str, float]
) -> None:
    target = scripted(kind, 3)
    assert (
        pvalue(count_pairs(target, options, trusting), exact_pairs(target, SamplingConfig(**options)))
        < MIN_PVALUE
    )


def test_a_child_of_probability_zero_is_never_accepted() -> None:
    logits_KV = torch.tensor([[-torch.inf, 0.0, 0.0]] * 4)
    tree, _ = tree_of({0: {}, 1: {}, 2: {}}, 0)
    for seed in range(300):
        accepted = accept(tree, logits_KV, 5, SamplingConfig(temperature=2.0, seed=seed))
        assert accepted.path[1:] != [1]
        assert 0 not in accepted.tokens


def test_the_accepted_path_equals_one_followed_by_hand() -> None:
    tree, texts = tree_of({1: {2: {}}, 2: {}}, 0)
    assert texts == [(), (1,), (2,), (1, 2)]
    logits_KV = torch.nn.functional.one_hot(torch.tensor([1, 2, 0, 0]), VOCAB).float()
    accepted = accept(tree, logits_KV, 10, SamplingConfig())
    assert (accepted.path, accepted.tokens) == ([0, 1, 3], [1, 2, 0])
    logits_KV[0] = torch.tensor([9.0, 0.0, 0.0])
    accepted = accept(tree, logits_KV, 10, SamplingConfig())
    assert (accepted.path, accepted.tokens) == (
        [0],
        [0],
    )  # no child has token 0: only the target's own token is emitted


@pytest.mark.parametrize("sampling", (SamplingConfig(), SamplingConfig(temperature=1.0)))
@pytest.mark.parametrize("node", range(4))
def test_nan_logits_are_rejected_at_every_node(node: int, sampling: SamplingConfig) -> None:
    tree, _ = tree_of({1: {2: {}}, 2: {}}, 0)
    logits_KV = torch.zeros(4, VOCAB)
    logits_KV[node, 1] = float("nan")
    with pytest.raises(YggError, match="not finite"):
        accept(tree, logits_KV, 10, sampling)
