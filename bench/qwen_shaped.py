"""Make a pair shaped like Qwen3-1.7B and Qwen3-0.6B, with random weights: how long a compilation of that
size takes needs no hub.

```
python -m bench.qwen_shaped FOLDER
ygg compile FOLDER/target FOLDER/draft --name qwen-shaped
```
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from yggdrasil.offline.traces import CALIBRATION_TEXT, read_texts

__all__ = ["SIZES", "VOCAB", "save_pair", "save_tokenizer"]

VOCAB = 151936
# tokens of which text consists; the others only make the vocabulary as large as the real one
NUM_TRAINED = 4096
END = "<|endoftext|>"
SIZES = {
    "target": {"hidden_size": 2048, "intermediate_size": 6144},
    "draft": {"hidden_size": 1024, "intermediate_size": 3072},
}
SHARED = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def save_pair(folder: Path, *, vocab: int = VOCAB, **sizes: int) -> None:
    """Write `target` and `draft` into a folder, in bf16.

    Args:
        sizes: Fields of `Qwen3Config` that differ from the real ones.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    for name, own in SIZES.items():
        eos = save_tokenizer(folder / name, read_texts(CALIBRATION_TEXT), vocab).eos_token_id
        fields: dict[str, Any] = {
            "vocab_size": vocab,
            "tie_word_embeddings": True,
            "eos_token_id": eos,
            "dtype": "bfloat16",
            **SHARED,
            **own,
            **sizes,
        }
        Qwen3ForCausalLM._from_config(Qwen3Config(**fields), dtype=torch.bfloat16).save_pretrained(
            folder / name
        )


def save_tokenizer(folder: Path, texts: Sequence[str], vocab: int) -> Any:
    """A byte-level BPE trained on a few texts and filled up with tokens that no text has; returns the
    transformers tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, NUM_TRAINED),
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    state = json.loads(backend.to_str())
    known = state["model"]["vocab"]
    known.update({f"<unused {token}>": token for token in range(len(known), vocab)})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=END
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.qwen_shaped", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="folder to write; gets target/ and draft/, 4.6 GB")
    folder = parser.parse_args().folder
    save_pair(folder)
    print(f"next: ygg compile {folder / 'target'} {folder / 'draft'} --name qwen-shaped")


if __name__ == "__main__":
    main()
