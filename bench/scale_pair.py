"""Inflate a Llama checkpoint to a real size without changing what it computes: real acceptance at real
latency, no hub needed.

```
python -m bench.scale_pair SOURCE OUT [--width-multiple 4 | --width N] [--layers N] [--intermediate N]
                           [--heads N] [--kv-heads N] [--seed S]
```

The inflated model reads and multiplies everything that a model of its size does and writes the same text:

- the residual stream grows from d to D features; those beyond d are zero, because the embedding's columns
  and the rows of every o_proj and down_proj that would write them are zero. Whatever reads them (q, k, v,
  gate, up, the output head) is random;
- RMSNorm averages squares over D instead of d features, so it divides by a root mean square that is m =
  sqrt(D / d) times too small: the first d weights are divided by m, and epsilon by D / d. Where D / d is a
  power of four, m is a power of two and both divisions are exact in bf16. Any other width rounds the norms'
  weights once: then the function is the source's but for roundings, and so is the text where two tokens are
  nearly as likely;
- new query and KV heads and new feed-forward rows are random and feed zero columns of o_proj and down_proj.
  Query and KV heads grow by one factor and the new groups stand at the end, so every old query head keeps
  its KV head. With as many KV heads as query heads each gets a copy of its KV head. Heads keep their
  features: RoPE and the scale of the scores depend on them;
- new layers stand at the end and are random, but what they add to the residual is multiplied by a zero
  o_proj and down_proj.

No two random tensors are alike. The output head is untied from the embedding: its new columns can then be
random as well."""

from __future__ import annotations

import argparse
import copy
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from yggdrasil.store import artifacts

__all__ = ["inflate", "inflated_config", "num_parameters"]

STD = 0.02  # of a random weight, as in real Llama checkpoints
ZERO = ("embed_tokens", "o_proj", "down_proj")  # write the residual: nothing new may come out of them
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def inflate(
    source: Path,
    out: Path,
    *,
    width_multiple: int = 4,
    width: int | None = None,
    layers: int | None = None,
    intermediate: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """Write a larger checkpoint that computes the same function.

    Args:
        source: Hugging Face folder of a Llama-architecture model.
        out: Folder to write; must not exist.
        width_multiple: D / d, a power of four; also the default factor of the heads and the feed-forward
            rows.
        width: D itself instead, any.
        layers: Layers of the result; twice the source's by default.
        intermediate: Feed-forward rows of the result.
        heads: Query heads of the result: a multiple of the source's group size, a divisor of D.
        kv_heads: Follow from the query heads and the source's group size; or as many as query heads.
        seed: Of the random weights; another device draws others.
        device: Where random weights are drawn: billions of them take a processor minutes.

    Returns:
        The parameter count of the result.

    Raises:
        ValueError: not a Llama, or a size that cannot hold the source.
        FileExistsError: `out` is there already.

    Cost: seconds; both checkpoints in memory once.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if out.exists():
        raise FileExistsError(f"{out} exists: name a new folder or remove it")
    before = AutoConfig.from_pretrained(source)
    after = inflated_config(
        before,
        width_multiple=width_multiple,
        width=width,
        layers=layers,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
    )
    state = AutoModelForCausalLM.from_pretrained(source, dtype=before.dtype).state_dict()
    if (
        after.num_key_value_heads * before.num_attention_heads
        != after.num_attention_heads * before.num_key_value_heads
    ):
        _ungroup_(state, before)
    generator = torch.Generator(device).manual_seed(seed)
    norm_factor = math.sqrt(before.hidden_size / after.hidden_size)
    tensors = {
        name: _inflated(name, empty, state.get(name), norm_factor, before.dtype, generator)
        for name, empty in _empty_model(after).state_dict().items()
    }
    with artifacts.atomic_directory(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        after.save_pretrained(folder)
        for name in COPIED:
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
    return num_parameters(after)


def inflated_config(
    config: Any,
    *,
    width_multiple: int = 4,
    width: int | None = None,
    layers: int | None = None,
    intermediate: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> Any:
    """The configuration of the result; arguments as for `inflate`."""
    group = (
        1
        if kv_heads is not None and kv_heads == heads
        else config.num_attention_heads // config.num_key_value_heads
    )
    width = config.hidden_size * width_multiple if width is None else width
    layers = 2 * config.num_hidden_layers if layers is None else layers
    intermediate = config.intermediate_size * width_multiple if intermediate is None else intermediate
    heads = config.num_attention_heads * width_multiple if heads is None else heads
    _require(config.model_type == "llama", "model_type", config.model_type, "llama")
    _require(width_multiple in (1, 4, 16, 64), "width_multiple", width_multiple, "1, 4, 16 or 64")
    _require(layers >= config.num_hidden_layers, "layers", layers, f"at least {config.num_hidden_layers}")
    _require(
        intermediate >= config.intermediate_size,
        "intermediate",
        intermediate,
        f"at least {config.intermediate_size}",
    )
    _require(
        heads >= config.num_attention_heads and heads % group == 0,
        "heads",
        heads,
        f"a multiple of {group}, at least {config.num_attention_heads}",
    )
    _require(width >= config.hidden_size, "width", width, f"at least {config.hidden_size}")
    _require(width % heads == 0, "heads", heads, f"a divisor of the width, {width}")
    _require(
        kv_heads in (None, heads // group),
        "kv_heads",
        kv_heads,
        f"{heads // group} or the number of query heads",
    )
    inflated = copy.deepcopy(config)
    inflated.update(
        {
            "head_dim": config.head_dim,
            "hidden_size": width,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // group,
            "num_hidden_layers": layers,
            "rms_norm_eps": config.rms_norm_eps * config.hidden_size / width,
            "tie_word_embeddings": False,
        }
    )
    return inflated


def num_parameters(config: Any) -> int:
    """Weights of a model of this configuration. Cost: allocates nothing."""
    return sum(parameter.numel() for parameter in _empty_model(config).parameters())


def _empty_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _inflated(
    name: str,
    empty: Tensor,
    source: Tensor | None,
    norm_factor: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """One tensor of the result: zero or random, with the source in its first corner."""
    is_norm = "norm" in name
    is_zero = name.split(".")[-2] in ZERO
    tensor = (
        torch.zeros(empty.shape, dtype=dtype)
        if is_zero
        else _random(empty.shape, float(is_norm), dtype, generator)
    )
    if source is not None:
        tensor[tuple(slice(size) for size in source.shape)] = source * norm_factor if is_norm else source
    return tensor


def _random(shape: torch.Size, mean: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (
        torch.empty(shape, dtype=dtype, device=generator.device)
        .normal_(mean, STD, generator=generator)
        .cpu()
    )


def _ungroup_(state: dict[str, Tensor], config: Any) -> None:
    """Give every query head a KV head of its own, a copy of the one it shared."""
    group = config.num_attention_heads // config.num_key_value_heads
    for name in [name for name in state if name.split(".")[-2] in ("k_proj", "v_proj")]:
        state[name] = (
            state[name]
            .unflatten(0, (config.num_key_value_heads, -1))
            .repeat_interleave(group, dim=0)
            .flatten(0, 1)
        )


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: must be {allowed}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.scale_pair", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("source", type=Path, help="folder of a Llama-architecture checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--width-multiple", type=int, default=4, help="D / d, a power of four (default: %(default)s)"
    )
    parser.add_argument(
        "--width", type=int, help="D itself instead; where D / d is no power of four, norms are rounded"
    )
    parser.add_argument("--layers", type=int, help="layers of the result (default: twice the source's)")
    parser.add_argument(
        "--intermediate",
        type=int,
        help="feed-forward rows of the result (default: the source's times the width multiple)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        help="query heads of the result (default: the source's times the width multiple)",
    )
    parser.add_argument(
        "--kv-heads",
        type=int,
        help="KV heads of the result: as many as query heads (default: the source's groups)",
    )
    parser.add_argument(
        "--device", default="cpu", help="where random weights are drawn (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    options = vars(parser.parse_args())
    try:
        count = inflate(**options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options['out']}: {count / 1e6:.1f} M parameters, the function of {options['source']}")


if __name__ == "__main__":
    main()
