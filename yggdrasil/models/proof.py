"""Is our forward the model's? Every layer reaches the tree attention once, and logits are those of
transformers' own eager forward.

```
passage    t0 t1 ... t15 | t16 t17 ... t23        at position 0, and at the last positions of the context
expected   one forward of all tokens by transformers, with its own attention
ours       a chain       | a path through a tree with a sibling before every node
```

What mixes tokens anywhere but in attention, a convolution for one, differs in the tree: a node's neighbours
are not the tokens before it.

Shapes: L = tokens of a passage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from yggdrasil.errors import UnsupportedModel, first_line
from yggdrasil.kv import KVCache, KVShape
from yggdrasil.layout import PAGE_LEN, POSITION
from yggdrasil.models.attention import IMPLEMENTATION, AttentionCall, recorded_calls
from yggdrasil.models.forward import TargetForward
from yggdrasil.models.packing import empty_meta, pack_chain_, pack_nodes_
from yggdrasil.tree import TokenTree

__all__ = ["TOLERANCE", "Passage", "check_forward", "deviation", "expected_passages", "sibling_tree"]

PREFIX_LEN = 16
PATH_LEN = 8
PASSAGE_LEN = PREFIX_LEN + PATH_LEN
CAPACITY = (PASSAGE_LEN + PATH_LEN + PAGE_LEN - 1) // PAGE_LEN * PAGE_LEN

TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Most that a token's logits may differ, in standard deviations of them over the vocabulary.

Over the architectures of `bench/architectures.py`, of 2 to 48 layers, rounding takes 1e-6 to 1e-5 of them
in fp32 and 0.01 to 0.07 in bf16; another function
takes 0.5 and more.
"""


class Passage(NamedTuple):
    """Tokens with the logits that transformers computes.

    Args:
        tokens: Vocabulary ids.
        start_pos: Position of the first.
        logits_LV: Of every token.
    """

    tokens: tuple[int, ...]
    start_pos: int
    logits_LV: Tensor


@torch.no_grad()
def expected_passages(name: str, model: Any, vocab: int, num_positions: int) -> list[Passage]:
    """Passages at the first and at the last positions, as transformers' own eager forward has them.

    Args:
        name: Of the model, for the error.
        model: As transformers loaded it, before anything in it is replaced; left as it is.
        num_positions: That a token may stand at: the context, and a tree after it.

    Raises:
        UnsupportedModel: its own forward fails at these positions, or is not finite.

    Cost: two forwards of 24 tokens; the logits are kept.
    """
    tokens = tuple((7919 * place + 11) % vocab for place in range(PASSAGE_LEN))
    with _own_attention(model):
        return [
            Passage(tokens, start, _own_logits(name, model, tokens, start)[:, :vocab])
            for start in sorted({0, num_positions - PASSAGE_LEN})
        ]


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
        assert model.config._attn_implementation == IMPLEMENTATION


def _own_logits(name: str, model: Any, tokens: Sequence[int], start_pos: int) -> Tensor:
    position_1L = torch.arange(start_pos, start_pos + len(tokens))[None]
    try:
        logits_LV: Tensor = model(
            input_ids=torch.tensor(tokens)[None], position_ids=position_1L, use_cache=False
        ).logits[0]
    except Exception as error:  # a model's code raises what it likes
        raise UnsupportedModel(
            name, f"a model whose own forward fails at position {start_pos} ({first_line(error)})"
        ) from error
    if not logits_LV.isfinite().all():
        raise UnsupportedModel(name, f"a model whose own logits at position {start_pos} are not finite")
    return logits_LV


@torch.no_grad()
def check_forward(
    name: str, model: Any, kv: KVShape, passages: Sequence[Passage], num_positions: int
) -> None:
    """Whether our forward of `model` is the model's.

    Args:
        name: Of the model, for the error.
        model: With tree attention, as it is exported: linear layers packed or not; on the CPU.
        kv: The cache that its configuration asks for; the capacity is not used.
        passages: From `expected_passages`.

    Raises:
        UnsupportedModel: names what differs.

    Cost: four forwards of at most 16 tokens.
    """
    for passage in passages:
        ours_LV = _our_logits(name, model, kv, passage, num_positions)
        deviates = deviation(ours_LV, passage.logits_LV)
        allowed = TOLERANCE[passage.logits_LV.dtype]
        if not deviates <= allowed:  # not a number is no agreement
            what = (
                f"its logits differ from transformers' own by {deviates:.2g} of their spread, above "
                f"{allowed:.2g}, at positions from {passage.start_pos}"
            )
            raise UnsupportedModel(
                name, f"{_architecture(model)}, which this runtime computes wrongly ({what}),"
            )


def deviation(ours_LV: Tensor, expected_LV: Tensor) -> float:
    """The largest distance of a token's logits, root of the mean square, in standard deviations of what is
    expected over the vocabulary.
    """
    distance_L = (ours_LV.float() - expected_LV.float()).square().mean(dim=-1).sqrt()
    return float((distance_L / expected_LV.float().std(dim=-1)).max())


def _our_logits(name: str, model: Any, kv: KVShape, passage: Passage, num_positions: int) -> Tensor:
    cache = KVCache(replace(kv, capacity=CAPACITY), dtype=model.dtype, device="cpu")
    forward = TargetForward(model, cache, passage.logits_LV.shape[1])
    tree, nodes = sibling_tree(passage.tokens[PREFIX_LEN:], max_depth=PATH_LEN)
    chain_NM = empty_meta(PREFIX_LEN, PATH_LEN)
    tree_NM = empty_meta(len(tree), PATH_LEN)
    pack_chain_(chain_NM, passage.tokens[:PREFIX_LEN], 0)
    pack_nodes_(tree_NM, tree, 0, len(tree), PREFIX_LEN)
    logits = []
    for meta_NM in (chain_NM, tree_NM):
        meta_NM[:, POSITION] += passage.start_pos
        with recorded_calls() as calls:
            try:
                logits.append(forward(meta_NM)[0])
            # shapes that are not the cache's, an output embedding that is not called, own errors
            except Exception as error:
                failure = first_line(error)
            else:
                failure = ""
        _check_calls(name, model, kv, calls, num_positions, failure)
    return torch.cat((logits[0], logits[1][nodes]))


def sibling_tree(
    tokens: Sequence[int], *, max_depth: int, device: str = "cpu"
) -> tuple[TokenTree, list[int]]:
    """A path of these tokens through a tree where every node but the root has an earlier sibling, so that
    its keys lie in every second slot; and its nodes.
    """
    tree = TokenTree.root(tokens[0], 2 * len(tokens) - 1, max_depth=max_depth, device=device)
    nodes = [0]
    for depth, token in enumerate(tokens[1:], 1):
        sibling = token - 1 if token else 1
        tree.grow(
            *(
                torch.tensor(column, device=device)
                for column in ([nodes[-1]] * 2, [sibling, token], [-float(depth)] * 2)
            )
        )
        nodes.append(len(tree) - 1)
    return tree, nodes


def _check_calls(
    name: str, model: Any, kv: KVShape, calls: Sequence[AttentionCall], num_positions: int, failure: str
) -> None:
    """Raises UnsupportedModel for attention that is not the cache's or not plain, for a forward that
    failed, and for layers that did not ask once each.
    """
    architecture = _architecture(model)
    for call in calls:
        sizes = [list(each) for each in (call.query, call.key, call.value)]
        if (
            call.key != call.value
            or [call.key[1], call.key[3], call.query[3]] != [kv.num_kv_heads, kv.head_dim, kv.head_dim]
            or call.layer >= kv.num_layers
        ):
            cached = f"{kv.num_layers} layers of {kv.num_kv_heads} heads of {kv.head_dim} features"
            raise UnsupportedModel(
                name,
                f"{architecture}, whose layer {call.layer} attends with {sizes}, where config.json "
                f"promises {cached},",
            )
        window = call.options.get("sliding_window")
        if unknown := sorted(call.options.keys() - {"sliding_window"}):
            raise UnsupportedModel(
                name, f"{architecture}, whose layer {call.layer} attends with {unknown[0]!r},"
            )
        if window is not None and window < num_positions:
            raise UnsupportedModel(
                name,
                f"{architecture}, whose layer {call.layer} has a window of {window} tokens for "
                f"{num_positions} positions,",
            )
    if failure:
        raise UnsupportedModel(
            name, f"{architecture}, whose forward fails with tree attention ({failure}),"
        )
    counts = Counter(call.layer for call in calls)
    odd = [layer for layer in range(kv.num_layers) if counts[layer] != 1]
    if odd:
        raise UnsupportedModel(
            name,
            f"{architecture}, whose layer {odd[0]} asks for attention {counts[odd[0]]} times in a forward,",
        )


def _architecture(model: Any) -> str:
    return type(model).__name__
