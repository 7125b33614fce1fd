"""Check that our forward computes what the model computes.

Every layer must call the tree attention once, and logits must agree with transformers' own eager forward.

```
passage    t0 t1 ... t15 | t16 t17 ... t23        at position 0, and at the last positions of the context
expected   one forward of all tokens by transformers, with its own attention
ours       a chain       | a path through a tree with a sibling before every node
```

A layer that mixes tokens outside attention, such as a convolution, fails in the tree: the rows before a
node are not the tokens before it.

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
from yggdrasil.kernels.linear import COLUMNS, PackedLinear, reference
from yggdrasil.kv import KVCache, KVShape
from yggdrasil.layout import PAGE_LEN, POSITION
from yggdrasil.models.attention import IMPLEMENTATION, AttentionCall, recorded_calls
from yggdrasil.models.forward import TargetForward
from yggdrasil.models.packing import empty_meta, pack_chain_, pack_nodes_
from yggdrasil.tree import TokenTree

__all__ = [
    "TOLERANCE",
    "Passage",
    "check_forward",
    "check_rounded",
    "deviation",
    "expected_passages",
    "own_attention",
    "sibling_tree",
]

PREFIX_LEN = 16
PATH_LEN = 8
PASSAGE_LEN = PREFIX_LEN + PATH_LEN
ROUNDED_ROWS = 7
CAPACITY = (PASSAGE_LEN + PATH_LEN + PAGE_LEN - 1) // PAGE_LEN * PAGE_LEN

TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest allowed deviation of a token's logits, in their standard deviations over the vocabulary.

For the architectures of `bench/architectures.py` with 2 to 48 layers, rounding deviates by 1e-6 to 1e-5 in
fp32 and by 0.01 to 0.07 in bf16; a wrong function deviates by 0.5 or more.
"""


class Passage(NamedTuple):
    """Tokens and the logits that transformers computes for them.

    Args:
        start_pos: Position of the first token.
    """

    tokens: tuple[int, ...]
    start_pos: int
    logits_LV: Tensor


@torch.no_grad()
def expected_passages(name: str, model: Any, vocab: int, num_positions: int) -> list[Passage]:
    """Passages at the first and at the last positions, with logits of transformers' own eager forward.

    Args:
        name: Name of the model, for the error.
        model: The model as transformers loaded it, before any layer is replaced. It is not changed.
        num_positions: Number of positions that a token can have: the context, and a tree after it.

    Raises:
        UnsupportedModel: the model's own forward fails at these positions, or its logits are not finite.

    Cost: two forwards of 24 tokens; the logits are kept.
    """
    tokens = tuple((7919 * place + 11) % vocab for place in range(PASSAGE_LEN))
    with own_attention(model):
        return [
            Passage(tokens, start, _own_logits(name, model, tokens, start)[:, :vocab])
            for start in sorted({0, num_positions - PASSAGE_LEN})
        ]


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Within it, a model attends as transformers does, without a cache."""
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
    # a model's code may raise any error
    except Exception as error:
        failure = f"a model whose own forward fails at position {start_pos} ({first_line(error)})"
        raise UnsupportedModel(name, failure) from error
    if not logits_LV.isfinite().all():
        raise UnsupportedModel(name, f"a model whose own logits at position {start_pos} are not finite")
    return logits_LV


@torch.no_grad()
def check_forward(
    name: str, model: Any, kv: KVShape, passages: Sequence[Passage], num_positions: int
) -> None:
    """Check our forward of `model` against the passages.

    Args:
        name: Name of the model, for the error.
        model: The model with tree attention as it is exported, on the CPU; linear layers packed or not.
        kv: Shape of the cache by the model's configuration; the capacity is not used.
        passages: From `expected_passages`.
        num_positions: The same as for `expected_passages`.

    Raises:
        UnsupportedModel: names the difference.

    Cost: four forwards of at most 16 tokens.
    """
    for passage in passages:
        ours_LV = _our_logits(name, model, kv, passage, num_positions)
        found = deviation(ours_LV, passage.logits_LV)
        allowed = TOLERANCE[passage.logits_LV.dtype]
        # written so that NaN is refused too
        if not found <= allowed:
            difference = (
                f"its logits differ from transformers' own by {found:.2g} of their spread, above "
                f"{allowed:.2g}, at positions from {passage.start_pos}"
            )
            feature = f"{_architecture(model)}, which this runtime computes wrongly ({difference}),"
            raise UnsupportedModel(name, feature)


@torch.no_grad()
def check_rounded(name: str, model: Any) -> None:
    """Check that layers with rounded weights compute the bits of `kernels.linear.reference`.

    `check_forward` has proved the model with its weights as they were.

    Args:
        name: Name of the model, for the error.
        model: Its linear layers are packed.

    Raises:
        RuntimeError: a bit differs, which is a defect of the operators.

    Cost: a product of a few rows with every weight; torch's slow form computes the first and the last
        panel of each.
    """
    noise = torch.Generator().manual_seed(0)
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, PackedLinear):
            continue
        x = torch.randn(ROUNDED_ROWS, layer.in_features, generator=noise).to(model.dtype)
        ours = layer(x)
        for panel in {0, len(layer.packed) - 1}:
            columns = slice(panel * COLUMNS, min((panel + 1) * COLUMNS, layer.out_features))
            bias = None if layer.bias is None else layer.bias[columns]
            part = layer.packed[panel : panel + 1]
            if not torch.equal(ours[:, columns], reference(x, part, bias, ours[:, columns].shape[1])):
                raise RuntimeError(f"{name}: {layer_name} with rounded weights differs from its reference")


def deviation(ours_LV: Tensor, expected_LV: Tensor) -> float:
    """The largest root mean square error of a token's logits, in their expected standard deviations."""
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
            # shapes that do not fit the cache, an output embedding that is not called, a model's own errors
            except Exception as error:
                failure = first_line(error)
            else:
                failure = ""
        _check_calls(name, model, kv, calls, num_positions, failure)
    return torch.cat((logits[0], logits[1][nodes]))


def sibling_tree(
    tokens: Sequence[int], *, max_depth: int, device: str = "cpu"
) -> tuple[TokenTree, list[int]]:
    """A tree with `tokens` as a path, and the nodes of the path.

    Every node of the path but the root has an earlier sibling, so the path's keys lie in every second slot.
    """
    tree = TokenTree.root(tokens[0], 2 * len(tokens) - 1, max_depth=max_depth, device=device)
    nodes = [0]
    for depth, token in enumerate(tokens[1:], 1):
        sibling = token - 1 if token else 1
        columns = ([nodes[-1]] * 2, [sibling, token], [-float(depth)] * 2)
        tree.grow(*(torch.tensor(column, device=device) for column in columns))
        nodes.append(len(tree) - 1)
    return tree, nodes


def _check_calls(
    name: str, model: Any, kv: KVShape, calls: Sequence[AttentionCall], num_positions: int, failure: str
) -> None:
    """Raises UnsupportedModel for calls that tree attention cannot serve, and for a forward that failed."""
    architecture = _architecture(model)
    for call in calls:
        if problem := _call_problem(call, kv, num_positions):
            raise UnsupportedModel(name, f"{architecture}, whose layer {call.layer} {problem},")
    if failure:
        feature = f"{architecture}, whose forward fails with tree attention ({failure}),"
        raise UnsupportedModel(name, feature)
    counts = Counter(call.layer for call in calls)
    odd = [layer for layer in range(kv.num_layers) if counts[layer] != 1]
    if odd:
        times = f"layer {odd[0]} asks for attention {counts[odd[0]]} times in a forward"
        raise UnsupportedModel(name, f"{architecture}, whose {times},")


def _call_problem(call: AttentionCall, kv: KVShape, num_positions: int) -> str:
    """What tree attention does not support in this call, to follow "whose layer"; empty if nothing."""
    if (
        call.key != call.value
        or [call.key[1], call.key[3], call.query[3]] != [kv.num_kv_heads, kv.head_dim, kv.head_dim]
        or call.layer >= kv.num_layers
    ):
        sizes = [list(each) for each in (call.query, call.key, call.value)]
        cached = f"{kv.num_layers} layers of {kv.num_kv_heads} heads of {kv.head_dim} features"
        return f"attends with {sizes}, where config.json promises {cached}"
    if unsupported := sorted(call.options.keys() - {"sliding_window"}):
        return f"attends with {unsupported[0]!r}"
    window = call.options.get("sliding_window")
    if window is not None and window < num_positions:
        return f"has a window of {window} tokens for {num_positions} positions"
    return ""


def _architecture(model: Any) -> str:
    return type(model).__name__
