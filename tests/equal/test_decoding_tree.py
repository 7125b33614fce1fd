"""A tree that decodes by itself writes the engine's text, and its KV slots have the engine's bits.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from yggdrasil.api import Pair
from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig
from yggdrasil.errors import CapacityError, ConfigError, ShapeNotCompiled, YggError
from yggdrasil.page_order import by_slot
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.state import PLAIN, DecodeState, Shape
from yggdrasil.step import decoding_tree
from yggdrasil.step.decoding_tree import DecodingTree

PROMPT = "One day Lily saw a red fox near the café."
NUM_TOKENS = 60
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(temperature=0.8, top_p=0.95, seed=7),
    "processed": SamplingConfig.of({"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3}),
}
SHAPES = (Shape(1, 4), Shape(4, 4), Shape(4, 2, 3), Shape(2, 3, graft=2), PLAIN)


def plain_text(pair: Pair, sampling: SamplingConfig, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The target's own tokens after the prompt, without speculation."""
    config = GenerateConfig(max_new_tokens=num_tokens, ignore_eos=True, sampling=sampling)
    steps = pair.engine.generate(pair.tokens(PROMPT), plain_policy(), config)
    return [token for result in steps for token in result.tokens]


def decode(pair: Pair, tree: DecodingTree, shapes: Sequence[Shape], k: int | None = None) -> list[int]:
    """Decode step by step, one shape after another, until there are enough tokens."""
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS:
        tree.grow_with(pair.engine.draft, shapes[0])
        shapes = [*shapes[1:], shapes[0]]
        if k is not None:
            tree.prune_(k)
        tokens += tree.verify_with(pair.engine.target)
    assert tree.row.state.emitted[-len(tokens) :] == tokens
    return tokens[:NUM_TOKENS]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_tree_that_decodes_writes_the_plain_text(pair: Pair, sampling: SamplingConfig) -> None:
    expected = plain_text(pair, sampling)
    for shape in SHAPES:
        assert decode(pair, pair.tree(PROMPT, sampling), [shape]) == expected, shape
    assert decode(pair, pair.tree(PROMPT, sampling), SHAPES, k=4) == expected


def test_its_accepted_paths_are_those_of_the_engine(pair: Pair) -> None:
    shape = Shape(4, 4, 8)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    results = list(pair.engine.generate(pair.tokens(PROMPT), pair.policy(shape=shape), config))
    tree = pair.tree(PROMPT, config.sampling)
    for result in results[:-1]:
        tree.grow_with(pair.engine.draft, shape)
        assert tree.token_N.tolist() == result.tree.token_N.tolist()
        assert tree.parent_N.tolist() == result.tree.parent_N.tolist()
        assert tree.verify_with(pair.engine.target) == result.tokens
    assert any(result.accepted for result in results)


def test_its_slots_have_the_bits_of_a_text_that_was_read(pair: Pair) -> None:
    tree = pair.tree(PROMPT)
    decode(pair, tree, [Shape(4, 4), Shape(4, 2)])
    root_pos = tree.row.state.root_pos
    assert pair.engine.target.cache.len == root_pos
    draft_len = pair.engine.draft.cache.len
    written = [storage.clone() for storage in storages(pair, root_pos, draft_len)]
    read = pair.tree(tree.row.state.tokens)
    read.grow_with(pair.engine.draft, Shape(1, 1))  # catches up
    for ours, theirs in zip(written, storages(pair, root_pos, draft_len), strict=True):
        assert torch.equal(ours, theirs)


def storages(pair: Pair, target_len: int, draft_len: int) -> list[torch.Tensor]:
    """The KV of the first tokens of both models: (tokens, layers, 2, G, F)."""
    models = ((pair.engine.target, target_len), (pair.engine.draft, draft_len))
    return [
        by_slot(model.cache.storage_PL2GSF).movedim(4, 1).flatten(0, 1)[:length] for model, length in models
    ]


def test_nodes_attached_by_hand_are_verified(pair: Pair) -> None:
    expected = plain_text(pair, SamplingConfig())
    tree = pair.tree(PROMPT)
    wrong = (expected[0] + 1) % pair.bundle.vocab
    tree.grow([0, 0], [expected[0], wrong], [-0.1, -0.2])
    tree.grow([1], [expected[1]], [-0.3])
    assert tree.verify_with(pair.engine.target) == expected[:3]
    tree.grow_with(pair.engine.draft, Shape(1, 1))
    tree.prune_(1)
    tree.grow([0], [expected[3]], [-0.1])
    assert tree.verify_with(pair.engine.target) == expected[3:5]
    assert decode(pair, tree, [Shape(4, 4)])[: NUM_TOKENS - 5] == expected[5:]


def attached(tree: DecodingTree, token: int) -> DecodingTree:
    """The tree with another child of the root."""
    tree.grow([0], [token], [-9.0])
    return tree


def test_between_two_verifications_it_is_a_tree_like_any_other(pair: Pair) -> None:
    tree = pair.tree(PROMPT)
    assert repr(tree) == f"DecodingTree(1 nodes, depth 0, after {tree.row.state.root_pos} tokens)"
    tree.grow_with(pair.engine.draft, Shape(4, 3))
    tree.check()
    assert len(tree) == 13
    assert len(tree.drafted_node) == 13
    assert tree.to_svg().startswith("<svg")
    tree.prune_(5)
    tree.check()
    assert len(tree) == len(tree.drafted_node) == 5
    assert tree.drafted_node == sorted(tree.drafted_node)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda tree, pair: tree.grow_with(pair.engine.target, Shape(1, 1)), "pair.engine.draft"),
        (lambda tree, pair: tree.verify_with(pair.engine.draft), "pair.engine.target"),
        (lambda tree, pair: tree.grow_with(pair.engine.draft, Shape(5, 1)), "width: 5 is not allowed"),
        (lambda tree, pair: tree.grow_with(pair.engine.draft, Shape(1, 5)), "depth: 5 is not allowed"),
        (lambda tree, pair: tree.prune_(0), "k: 0 is not allowed"),
        (
            lambda tree, pair: [tree.grow_with(pair.engine.draft, Shape(1, 1)) for _ in range(2)],
            "nodes: 2 is not allowed; it must be 1: a tree grows from its root",
        ),
        (lambda tree, pair: attached(tree, 10**6).verify_with(pair.engine.target), "tokens: [1000000] is"),
        (lambda tree, pair: attached(tree, -1).verify_with(pair.engine.target), "tokens: [-1] is"),
        (lambda tree, pair: pair.tree([]), "prompt: '' is not allowed"),
        (lambda tree, pair: pair.tree([10**6]), "made of token ids"),
        (
            lambda tree, pair: pair.tree(
                PROMPT, SamplingConfig.of({"grammar": GrammarConfig.of("regex", "a")})
            ),
            "grammar: 'a' is not allowed; it must be left out for a tree",
        ),
    ],
)
def test_a_wrong_call_is_one_clear_line(
    pair: Pair, call: Callable[[DecodingTree, Any], Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        call(pair.tree(PROMPT), pair)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_nodes_than_a_graph_takes_are_refused_and_can_be_pruned(pair: Pair) -> None:
    expected = plain_text(pair, SamplingConfig(), 1)
    tree = pair.tree(PROMPT)
    most = pair.engine.target.prefill_chunk
    tree.grow([0] * most, list(range(most)), [-1.0] * most)
    with pytest.raises(ShapeNotCompiled, match=f"no compiled graph takes {most + 1} tokens"):
        tree.verify_with(pair.engine.target)
    tree.prune_(1)
    assert tree.verify_with(pair.engine.target) == expected


def test_a_tree_ends_where_another_text_begins(pair: Pair) -> None:
    tree = pair.tree(PROMPT)
    tree.grow_with(pair.engine.draft, Shape(2, 2))
    pair.generate("The owl said:", max_new_tokens=4)
    with pytest.raises(YggError, match="another generation has begun on this engine"):
        tree.verify_with(pair.engine.target)
    steps = pair.engine.generate(pair.tokens(PROMPT), plain_policy(), GenerateConfig(max_new_tokens=9))
    next(steps)
    pair.tree(PROMPT)
    with pytest.raises(YggError, match="another generation has begun on this engine"):
        next(steps)


def test_what_a_tree_wrote_changes_no_later_text(pair: Pair) -> None:
    """Also where the tree has drafts that were not verified, and where the text begins alike."""
    expected = plain_text(pair, SamplingConfig(), 20)
    tokens = pair.tokens(PROMPT)
    config = GenerateConfig(max_new_tokens=20, ignore_eos=True)

    def write_tree() -> None:
        tree = pair.tree(PROMPT, SAMPLINGS["sampled"])
        decode(pair, tree, [Shape(4, 4)])
        tree.grow_with(pair.engine.draft, Shape(4, 4))

    for keep in (False, True):
        write_tree()
        steps = pair.engine.generate(tokens, pair.policy(), config, keep=keep)
        assert [token for result in steps for token in result.tokens] == expected
    write_tree()
    state = DecodeState(list(tokens))
    while state.num_emitted < 20:
        pair.engine.step(state, pair.policy(shape=Shape(4, 4)))
    assert list(state.emitted)[:20] == expected


@pytest.mark.parametrize("name", ("draft_rows", "prune_rows", "verify_rows", "follow", "commit_row_"))
@pytest.mark.parametrize("is_late", (False, True), ids=("before", "after"))
def test_an_interrupted_call_loses_at_most_its_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str, is_late: bool
) -> None:
    expected = plain_text(pair, SamplingConfig())
    tree = pair.tree(PROMPT)
    tree.grow_with(pair.engine.draft, Shape(4, 3))
    tree.verify_with(pair.engine.target)
    real = getattr(decoding_tree, name)

    def interrupt(*arguments: Any, **options: Any) -> Any:
        if is_late:
            real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(decoding_tree, name, interrupt)
        tree.grow_with(pair.engine.draft, Shape(4, 3))
        tree.verify_with(pair.engine.target)
    while tree.row.state.num_emitted < NUM_TOKENS:
        if len(tree) == 1:
            tree.grow_with(pair.engine.draft, Shape(4, 3))
        tree.verify_with(pair.engine.target)
    assert tree.row.state.emitted[:NUM_TOKENS] == expected


class Interrupting:
    """An array into which nothing can be copied."""

    def __setitem__(self, place: object, value: object) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("num_copied", range(5))
@pytest.mark.parametrize("name", ("grow", "prune", "verify"))
def test_an_interrupt_while_nodes_are_copied_leaves_a_whole_tree(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str, num_copied: int
) -> None:
    expected = plain_text(pair, SamplingConfig())
    tree = pair.tree(PROMPT)
    decode_step(pair, tree)
    if name != "grow":
        tree.grow_with(pair.engine.draft, Shape(4, 3))
    calls = {
        "grow": lambda: tree.grow_with(pair.engine.draft, Shape(4, 3)),
        "prune": lambda: tree.prune_(5),
        "verify": lambda: tree.verify_with(pair.engine.target),
    }
    whole = tree.arrays
    broken = [*whole[:num_copied], *[Interrupting()] * (5 - num_copied)]
    root_pos = tree.row.state.root_pos

    def arrays(self: DecodingTree) -> Sequence[Any]:
        is_read = name == "verify" and self.row.state.root_pos == root_pos  # by the target
        return whole if is_read else broken

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(DecodingTree, "arrays", property(arrays))
        calls[name]()
    tree.check()
    assert len(tree) == 1
    while tree.row.state.num_emitted < NUM_TOKENS:
        tree.verify_with(pair.engine.target)
        tree.grow_with(pair.engine.draft, Shape(4, 3))
    assert tree.row.state.emitted[:NUM_TOKENS] == expected


def decode_step(pair: Pair, tree: DecodingTree) -> list[int]:
    tree.grow_with(pair.engine.draft, Shape(4, 3))
    return tree.verify_with(pair.engine.target)


def test_a_text_ends_with_the_context(pair: Pair) -> None:
    limit = pair.bundle.max_context
    tree = pair.tree(pair.tokens(PROMPT) * (limit // len(pair.tokens(PROMPT)) - 1))
    with pytest.raises(CapacityError, match="context is full: 1 needed, 0 free"):
        while True:
            tree.grow_with(pair.engine.draft, Shape(4, 4))
            tree.verify_with(pair.engine.target)
    assert len(tree.row.state.tokens) >= limit
