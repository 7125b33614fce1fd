"""Pairs of models small enough to build and compile inside a test run: a tokenizer, a grammar to learn,
three architectures.

Shapes: L = tokens of a text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

END = "<|end|>"
VOCAB = 384
ANIMALS = ("fox", "dog", "owl", "bear", "mouse")
COLOURS = ("red", "grey", "small", "old", "happy")
NAMES = ("Tom", "Lily", "Max", "Zoë")
PLACES = ("forest", "garden", "café", "river")
VERBS = ("run", "sing", "sleep", "dance")


class SilentProgress:
    """Progress that reports nothing."""

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        yield

    def advance(self, count: int = 1) -> None:
        pass

    def note(self, line: str) -> None:
        pass


class CountedProgress(SilentProgress):
    """Counts the steps of every phase, and keeps its total."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        self.totals[name] = total
        self.done[name] = 0
        yield

    def advance(self, count: int = 1) -> None:
        self.done[list(self.totals)[-1]] += count


def stories(count: int, seed: int = 0) -> list[str]:
    """Texts with fixed and free places, so that a small draft agrees with its target sometimes."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        animal = rng.choice(ANIMALS)
        other = rng.choice(ANIMALS)
        name = rng.choice(NAMES)
        place = rng.choice(PLACES)
        texts.append(
            f"Once upon a time there was a {rng.choice(COLOURS)} {animal} named {name}. "
            f"{name} liked to {rng.choice(VERBS)} in the {place}. "
            f"One day {name} saw a {rng.choice(COLOURS)} {other} near the {place}. "
            f"The {other} said: let us {rng.choice(VERBS)} together! "
            f"So {name} and the {other} went home and were friends."
        )
    return texts


def save_tokenizer(folder: Path) -> Any:
    """A byte-level BPE of 384 tokens with an end of text, trained on the stories; returns the transformers
    tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        stories(200),
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    assert backend.get_vocab_size() == VOCAB
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_sentence_piece_tokenizer(folder: Path, *, is_llama: bool) -> Path:
    """A BPE whose tokens carry the blank before them and whose decoder strips the one that begins a text:
    Metaspace's, or Llama's chain of four.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    llama = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(llama) if is_llama else decoders.Metaspace()
    backend.train_from_iterator(
        stories(200), trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], show_progress=False)
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def save_calibration(path: Path) -> Path:
    """Held-out stories as one text, blank lines between them."""
    path.write_text("\n\n".join(stories(8, seed=99)))
    return path


def save_llama_pair(folder: Path) -> tuple[str, str]:
    """A Llama target (2 layers, 4 query heads on 2 key/value heads) and a smaller draft, both taught the
    stories for a moment.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    for name, hidden, layers, steps in (("target", 64, 2, 160), ("draft", 32, 1, 160)):
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 16, num_key_value_heads=max(1, hidden // 32),
            max_position_embeddings=512, eos_token_id=0, bos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        tokenizer = save_tokenizer(folder / name)
        _teach(model, tokenizer, steps)
        model.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def save_padded(model: str, folder: Path, vocab: int) -> str:
    """The model with `vocab` embeddings; ids after the tokenizer's have larger logits than tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    padded = AutoModelForCausalLM.from_pretrained(model)
    padded.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        weight_VE = padded.get_output_embeddings().weight
        weight_VE[VOCAB:] = 3 * weight_VE[VOCAB - (vocab - VOCAB) : VOCAB]
    padded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def _teach(model: Any, tokenizer: Any, steps: int) -> None:
    rng = random.Random(1)
    stream = torch.tensor(
        [token for text in stories(300, seed=1) for token in [*tokenizer(text)["input_ids"], 0]]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        starts = [rng.randrange(len(stream) - 97) for _ in range(8)]
        batch_BL = torch.stack([stream[start : start + 96] for start in starts])
        loss = model(input_ids=batch_BL, labels=batch_BL).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def save_random_pair(folder: Path, architecture: str) -> tuple[str, str]:
    """A random pair of Qwen3 or GPT-NeoX; the draft is the target without its last layer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(random_config(architecture, num_layers=2))
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(20)  # logits with a clear maximum
    draft = AutoModelForCausalLM.from_config(random_config(architecture, num_layers=1))
    draft.load_state_dict(
        {name: tensor for name, tensor in target.state_dict().items() if name in draft.state_dict()}
    )
    for name, model in (("target", target), ("draft", draft)):
        save_tokenizer(folder / name)
        model.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def random_config(architecture: str, num_layers: int) -> Any:
    """Hidden size 64; the query heads of Qwen3 share key/value heads."""
    from transformers import GPTNeoXConfig, Qwen3Config

    shared = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.15,
    }
    if architecture == "qwen3":
        return Qwen3Config(**shared, num_key_value_heads=2, head_dim=32)
    return GPTNeoXConfig(**shared, rotary_pct=0.5)
