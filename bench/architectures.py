"""Is every causal LM of transformers either computed right or refused in one line?

Each architecture is built small, with random weights, from a shrunk copy of its own default configuration.
What `ygg compile` accepts, from the
configuration and by its proof, is then judged independently: a text in chunks and a branching tree, node by
node, against transformers' eager forward
over the path to that node, in fp32.

Refuted by one architecture that is accepted and differs, or that fails otherwise than by a refusal: the
exit code is 1.

Shapes: L = tokens of a text.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.lib.claim import Claim, Log
from yggdrasil.errors import YggError, first_line
from yggdrasil.kernels import load_kernels
from yggdrasil.kv import KVCache
from yggdrasil.models.attention import IMPLEMENTATION, register_attention
from yggdrasil.models.forward import TargetForward
from yggdrasil.models.packing import empty_meta, pack_chain_, pack_nodes_
from yggdrasil.models.proof import check_forward, deviation, expected_passages
from yggdrasil.models.support import check_supported, context_limits, kv_shape
from yggdrasil.tree import TokenTree

EQUAL = "equal"
REFUSED = "refused"
NOT_BUILT = "not built small"
WRONG = "WRONG"
QUICK = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt2",
    "starcoder2",
    "diffllama",
    "bert",
    "lfm2",
    "bloom",
)
POSITIONS = 128
CHUNKS = (16, 1, 5, 9)  # tokens of the text that run together
PARENTS = (0, 0, 1, 1, 2, 3, 3, 6, 7)  # of the nodes after the root
MAX_DEPTH = 8
MOST_WEIGHTS = 20_000_000
MOST_DEVIATION = 1e-4  # rounding is below 2e-6
GAIN = 6.0  # of every matrix: as they are drawn, attention is so even that what it attends to hardly shows
SMALL: Mapping[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "word_embed_proj_dim",
            "embedding_size",
            "attention_hidden_size",
        ),
        64,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    **dict.fromkeys(("head_dim", "kv_channels"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rotary_dim": 8,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found for one architecture.

    Args:
        model_type: As config.json names it.
        architecture: Class of the causal LM.
        detail: The refusal, or why it was not built, or what differs.
        deviation: Largest of a token's logits, in spreads; None where nothing was compared.
    """

    model_type: str
    architecture: str
    outcome: str
    detail: str = ""
    deviation: float | None = None


def architectures() -> dict[str, tuple[Any, Any]]:
    """Configuration and model class of every causal LM, by model type."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = {
        config.model_type: (config, MODEL_FOR_CAUSAL_LM_MAPPING[config])
        for config in MODEL_FOR_CAUSAL_LM_MAPPING
    }
    return {
        name: (config, model[0] if isinstance(model, tuple) else model)
        for name, (config, model) in sorted(found.items())
    }


def shrunk(config_class: Any) -> Any:
    """A small configuration, with one layer of every kind; the default one where the class takes no such
    sizes.
    """
    default = config_class()
    fields = default.to_dict()
    aliases = config_class.attribute_map
    small = {name: value for name, value in SMALL.items() if name in fields or aliases.get(name) in fields}
    small = {name: value for name, value in small.items() if aliases.get(name) not in small}
    if "multi_query" in fields:
        small.pop("num_key_value_heads", None)  # they follow from it
    if isinstance(fields.get("layer_types"), list):
        kinds = list(dict.fromkeys(fields["layer_types"]))
        small.update(layer_types=kinds, num_hidden_layers=len(kinds))
    try:
        return config_class(**small)
    except Exception:  # each class has rules of its own for what fits together
        return default


def judge(config_class: Any, model_class: Any) -> Row:
    """Build, prove, compare."""
    row = {"model_type": config_class.model_type, "architecture": model_class.__name__}
    try:
        config = shrunk(config_class)
    except Exception as error:  # its defaults alone are no model
        return Row(**row, outcome=NOT_BUILT, detail=f"{type(error).__name__}: {first_line(error)}")
    try:
        check_supported(config.model_type, config)
        num_positions = min([POSITIONS, *(limit.num_positions for limit in context_limits(config))])
        model = _built(model_class, config)
        if isinstance(model, str):
            return Row(**row, outcome=NOT_BUILT, detail=model)
        differs = _largest_deviation(model, num_positions)
    except YggError as error:
        is_line = "\n" not in str(error)
        return Row(
            **row,
            outcome=REFUSED if is_line else WRONG,
            detail=str(error).partition(" is not supported")[0],
        )
    except Exception as error:
        return Row(**row, outcome=WRONG, detail=f"{type(error).__name__}: {first_line(error)}")
    return Row(**row, outcome=EQUAL if differs <= MOST_DEVIATION else WRONG, deviation=differs)


def _built(model_class: Any, config: Any) -> Any:
    """The model in fp32 with random weights; a text where it cannot be built, or not small."""
    try:
        with torch.device("meta"):
            outline = model_class(config)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    num_weights = sum(parameter.numel() for parameter in outline.parameters())
    if num_weights > MOST_WEIGHTS:
        return f"{num_weights / 1e6:.0f} M weights"
    torch.manual_seed(0)
    model = (
        model_class._from_config(config, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        .eval()
        .requires_grad_(False)
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(GAIN)
    return model


@torch.no_grad()
def _largest_deviation(model: Any, num_positions: int) -> float:
    kv = kv_shape(model.config, 64)
    vocab = model.config.vocab_size
    passages = expected_passages(model.config.model_type, model, vocab, num_positions)
    text = [(37 * place + 5) % vocab for place in range(sum(CHUNKS))]
    tree = _tree(vocab)
    expected = [_own_rows(model, text)] + [
        _own_rows(model, text + _path_tokens(tree, node))[-1:] for node in range(len(tree))
    ]
    check_forward(model.config.model_type, model, kv, passages, num_positions)
    cache = KVCache(kv, dtype=torch.float32, device="cpu")
    forward = TargetForward(model, cache, vocab)
    ours = []
    for size in CHUNKS:
        meta_NM = empty_meta(size, MAX_DEPTH)
        pack_chain_(meta_NM, text[cache.len : cache.len + size], cache.len)
        ours.append(forward(meta_NM)[0])
        cache.commit_(range(size))
    meta_NM = empty_meta(len(tree), MAX_DEPTH)
    pack_nodes_(meta_NM, tree, 0, len(tree), cache.len)
    ours.append(forward(meta_NM)[0])
    return deviation(torch.cat(ours), torch.cat(expected))


def _tree(vocab: int) -> TokenTree:
    tree = TokenTree.root(3, 1 + len(PARENTS), max_depth=MAX_DEPTH)
    for node, parent in enumerate(PARENTS, 1):
        tree.grow(
            torch.tensor([parent]), torch.tensor([(11 * node + 2) % vocab]), torch.tensor([-float(node)])
        )
    return tree


def _path_tokens(tree: TokenTree, node: int) -> list[int]:
    tokens = tree.token_N.tolist()
    return [tokens[each] for each in tree.path_NA[node].tolist() if each >= 0]


def _own_rows(model: Any, tokens: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits_LV: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    model.set_attn_implementation(IMPLEMENTATION)
    return logits_LV


def line(row: Row) -> str:
    """A row as a person reads it."""
    return f"{row.model_type:<28} {row.outcome:<16} {row.detail or f'{row.deviation:.1e}'}"


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Judge all architectures, or those of a rehearsal."""
    load_kernels()
    register_attention()
    known = architectures()
    rows = []
    for name in QUICK if options.quick else known:
        rows.append(judge(*known[name]))
        log(line(rows[-1]))
    return {
        "counts": dict(Counter(row.outcome for row in rows)),
        "architectures": [asdict(row) for row in rows],
    }


def table(result: Mapping[str, Any]) -> str:
    """How many of each outcome."""
    counts = result["counts"]
    return ", ".join(
        f"{counts.get(outcome, 0)} {outcome}" for outcome in (EQUAL, REFUSED, NOT_BUILT, WRONG)
    )


CLAIM = Claim(
    name="architectures",
    doc=__doc__,
    measure=measure,
    table=table,
    devices=(),
    rehearsal=f"{len(QUICK)} architectures",
)

if __name__ == "__main__":
    sys.exit(1 if WRONG in CLAIM.main()["counts"] else 0)
