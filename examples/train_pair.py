"""Train a small target and a smaller draft on a file of stories: data path in, two Hugging Face folders
out.

    python examples/train_pair.py stories.txt --out pair --minutes-target 45 --minutes-draft 25

The text holds stories separated by ``<|endoftext|>``. The script trains a byte-level BPE tokenizer, then
the target (next-token loss), then the draft (distilled from the target, on the stories and on text the
target itself writes, since acceptance is decided on the target's own text). It leaves

    OUT/target, OUT/draft    config.json, generation_config.json, model.safetensors (bf16), tokenizer files
    OUT/metrics.json         what the model card quotes, measured on the test stories

Both learning rates follow the clock, so they reach zero when the minutes are spent, on any machine. The
folders are rewritten at every evaluation: ``--minutes-target 0`` keeps OUT/target and trains only the
draft.

Shapes: L = tokens of a row.
"""

import argparse
import copy
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
SPLITS = ("test", "validation")
TARGET_SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT_SIZES = {
    "standard": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on apart from the text.

    ``early_draft`` also keeps the first draft whose top-1 agreement reaches ``early_agreement``: a
    deliberately weaker draft to study how a runtime adapts."""

    out: Path
    minutes_target: float = 45.0
    minutes_draft: float = 25.0
    minutes_writing: float = 3.0  # of minutes_draft, spent sampling text from the target
    seed: int = 0
    vocab_size: int = 4096
    max_len: int = 1024
    batch_tokens: int = 4096
    dropout: float = 0.1  # the target sees each story many times
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    weight_decay: float = 0.1
    hard_weight: float = 0.5
    draft_size: str = "standard"
    eval_seconds: float = 150.0
    early_draft: Path | None = None
    early_agreement: float = 0.5
    calibration: Path | None = None
    prompts: Path | None = None

    def __post_init__(self) -> None:
        if self.batch_tokens % self.max_len:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} must be a multiple of max_len={self.max_len}"
            )
        if 0 < self.minutes_draft <= self.minutes_writing:
            raise ValueError(
                f"minutes_writing={self.minutes_writing} must be less than "
                f"minutes_draft={self.minutes_draft}"
            )


def read_stories(path: Path) -> list[str]:
    """The stories of a text file, in file order."""
    stories = [story.strip() for story in path.read_text(encoding="utf-8").split(END)]
    return [story for story in stories if story]


def split_of(story: str) -> str:
    """Which split a story belongs to: 5 % test, 5 % validation, 90 % train.

    Decided by the story's own text, so it holds for any subset or order of the file, and duplicates never
    straddle."""
    bucket = int(hashlib.sha256(story.encode()).hexdigest(), 16) % 20
    return SPLITS[bucket] if bucket < len(SPLITS) else "train"


def write_stories(path: Path, stories: list[str], limit: int) -> None:
    """The first ``limit`` stories as JSON lines ``{"text": ...}``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"text": story}) + "\n" for story in stories[:limit]), encoding="utf-8"
    )


def train_tokenizer(stories: list[str], vocab_size: int, max_len: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. Encoding adds no special token; END stands only between stories."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text yields {tokenizer.get_vocab_size()} tokens, vocab_size={vocab_size} needs more text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, stories: list[str]) -> torch.Tensor:
    """One stream of token ids: END story END story ..."""
    ids = tokenizer(stories)["input_ids"]
    flat = np.concatenate([np.array([tokenizer.eos_token_id, *story], dtype=np.int64) for story in ids])
    return torch.from_numpy(flat)


def windows(stream: torch.Tensor, length: int, offset: int = 0) -> torch.Tensor:
    """The stream cut into rows of ``length``; the remainder is dropped. # (tokens,) -> (B, L)"""
    num_rows = (len(stream) - offset) // length
    return stream[offset : offset + num_rows * length].view(num_rows, length)


def shuffled_batches(
    stream: torch.Tensor, length: int, batch_tokens: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless (B, L) batches; every epoch cuts the stream at another offset, so rows differ."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(length, (), generator=rng))
        row_NL = windows(stream, length, offset)
        row_NL = row_NL[torch.randperm(len(row_NL), generator=rng)]
        yield from (
            batch for batch in row_NL.split(batch_tokens // length) if len(batch) * length == batch_tokens
        )


def interleave(
    first: Iterator[torch.Tensor], second: Iterator[torch.Tensor], *, period: int
) -> Iterator[torch.Tensor]:
    """Batches of ``first``, every ``period``-th taken from ``second``."""
    while True:
        yield from (next(first) for _ in range(period - 1))
        yield next(second)


def new_model(sizes: dict[str, int], config: TrainConfig, end_id: int) -> LlamaForCausalLM:
    """A randomly initialised Llama with tied embeddings."""
    llama = LlamaConfig(
        vocab_size=config.vocab_size, max_position_embeddings=config.max_len, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=end_id, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(llama)


def add_dropout_(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on what each block adds to the residual stream, while training; Llama itself has none."""

    def drop(module: torch.nn.Module, _: tuple[torch.Tensor, ...], added: torch.Tensor) -> torch.Tensor:
        return F.dropout(added, rate, training=module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def save_folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a bf16 copy next to ``folder`` and swap it in, so a kill never leaves half a checkpoint."""
    partial = folder.with_name(folder.name + ".partial")
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    tokenizer_config = json.loads((partial / "tokenizer_config.json").read_text())
    # the name that transformers 4 and 5 both load
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (partial / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_frozen(folder: Path) -> LlamaForCausalLM:
    """A saved model in bf16: what is imitated and measured is what ships, not the fp32 master weights."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)


def autocast() -> torch.autocast:
    """bf16 matrix products over fp32 master weights."""
    return torch.autocast("cpu", torch.bfloat16)


def logits_of(model: LlamaForCausalLM, token_BL: torch.Tensor) -> torch.Tensor:
    """Logits that predict token_BL[:, 1:], fp32. # (B, L) -> (B * (L - 1), V)"""
    with autocast():
        logits_BLV = model(token_BL, use_cache=False).logits
    return logits_BLV[:, :-1].flatten(0, 1).float()


def next_token_loss(model: LlamaForCausalLM, token_BL: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, nats."""
    return F.cross_entropy(logits_of(model, token_BL), token_BL[:, 1:].flatten())


def distillation_loss(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, token_BL: torch.Tensor, hard_weight: float
) -> torch.Tensor:
    """Cross-entropy to the target's distribution (KL(target || draft) up to a constant) and to its argmax.

    The second term is what greedy acceptance checks.
    """
    with torch.no_grad():
        target_logits = logits_of(target, token_BL)
    draft_logits = logits_of(draft, token_BL)
    soft = F.cross_entropy(draft_logits, target_logits.softmax(-1))
    hard = F.cross_entropy(draft_logits, target_logits.argmax(-1))
    return soft + hard_weight * hard


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, row_NL: torch.Tensor) -> float:
    """Mean next-token loss over the rows, nats per token."""
    model.eval()
    losses = [float(next_token_loss(model, batch)) * len(batch) for batch in row_NL.split(16)]
    return sum(losses) / len(row_NL)


@torch.no_grad()
def agreement(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    row_NL: torch.Tensor,
    keep_NL: torch.Tensor | None = None,
) -> dict[str, float]:
    """How well the draft predicts the target, over the predictions that ``keep_NL`` marks (default all of
    them).

    Returns:
        top1: share of positions where both argmaxes are equal (acceptance of one greedy drafted token).
        overlap: mean of sum_v min(draft_v, target_v) (acceptance of one token sampled at temperature 1).
    """
    draft.eval()
    keep_NL = torch.ones_like(row_NL[:, 1:], dtype=torch.bool) if keep_NL is None else keep_NL
    top1 = []
    overlap = []
    for batch, keep in zip(row_NL.split(16), keep_NL.split(16), strict=True):
        draft_logits, target_logits = (logits_of(model, batch)[keep.flatten()] for model in (draft, target))
        top1.append((draft_logits.argmax(-1) == target_logits.argmax(-1)).float())
        overlap.append(torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1))
    return {"top1": float(torch.cat(top1).mean()), "overlap": float(torch.cat(overlap).mean())}


def written_mask(row_NL: torch.Tensor, prompt_len: int, end_id: int) -> torch.Tensor:
    """Which predictions the target made itself: after the prompt, up to its first END. # (N, L) -> (N, L -
    1)
    """
    written_NL = torch.arange(1, row_NL.shape[1]) >= prompt_len
    end_NL = (row_NL[:, 1:] == end_id) & written_NL
    return written_NL & (end_NL.int().cumsum(1) - end_NL.int() == 0)


def is_loop(tokens: list[int], repeats: int = 4, longest: int = 20) -> bool:
    """Whether the text ends in a phrase of at most ``longest`` tokens ``repeats`` times in a row."""
    lengths = range(1, min(longest, len(tokens) // repeats) + 1)
    return any(tokens[-size * repeats :] == tokens[-size:] * repeats for size in lengths)


@torch.no_grad()
def write_on(
    model: LlamaForCausalLM, prompt_BL: torch.Tensor, length: int, temperature_B: torch.Tensor
) -> torch.Tensor:
    """Extend every prompt to ``length`` tokens, each row at its own temperature (0 is greedy). # (B, L) ->
    (B, length)
    """
    cache = DynamicCache(config=model.config)
    token_BL = prompt_BL
    step_BL = prompt_BL
    while token_BL.shape[1] < length:
        with autocast():
            logits_BV = model(step_BL, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        # Gumbel noise scaled by the temperature: argmax samples softmax(logits / temperature), and is
        # greedy at 0.
        noise_BV = -torch.empty_like(logits_BV).exponential_().log()
        step_BL = (logits_BV + temperature_B[:, None] * noise_BV).argmax(-1, keepdim=True)
        token_BL = torch.cat([token_BL, step_BL], dim=1)
    return token_BL


def write_corpus(
    target: LlamaForCausalLM,
    stream: torch.Tensor,
    *,
    seconds: float,
    rows: int = 192,
    prompt_len: int = 32,
    length: int = 256,
) -> torch.Tensor:
    """Text by the target, for ``seconds``: excerpts of the training stream to continue, temperatures spread
    over 0 to 1.

    A third of the rows are greedy. Returns one flat stream whose rows of ``length`` tokens are whole
    samples."""
    temperature_B = torch.linspace(-0.5, 1.0, rows).clamp(min=0)
    opening_NL = windows(stream, prompt_len)
    samples = []
    stop = time.monotonic() + seconds
    while not samples or time.monotonic() < stop:
        prompt_BL = opening_NL[torch.randint(len(opening_NL), (rows,))]
        samples.append(write_on(target, prompt_BL, length, temperature_B).flatten())
    return torch.cat(samples)


def schedule(progress: float, warmup: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then cosine to zero. ``progress`` is the share of the time
    budget spent.
    """
    return min(progress / warmup, 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)))


def new_optimizers(model: LlamaForCausalLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay),
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def train_(
    model: LlamaForCausalLM,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterator[torch.Tensor],
    config: TrainConfig,
    *,
    seconds: float,
    evaluate: Callable[[], dict[str, float]],
) -> dict[str, float]:
    """Train ``model`` for ``seconds`` (compilation included), evaluating and saving through ``evaluate``.

    Returns:
        steps, tokens and seconds spent.
    """  # fmt: skip
    optimizers = new_optimizers(model, config)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    loss_of = torch.compile(loss_of, dynamic=False)
    start = time.monotonic()
    steps = 0
    tokens = 0
    next_eval = config.eval_seconds / 4
    losses = []
    while (elapsed := time.monotonic() - start) < seconds:
        model.train()
        batch = next(batches)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(elapsed / seconds)
            optimizer.step()
            optimizer.zero_grad()
        steps = steps + 1
        tokens = tokens + batch.numel()
        losses = [*losses[-49:], loss.item()]
        if elapsed >= next_eval:
            next_eval = elapsed + min(config.eval_seconds, elapsed)
            report = {
                "step": steps,
                "tokens": tokens,
                "seconds": round(elapsed),
                "train_loss": float(np.mean(losses)),
            }
            print(json.dumps(report | evaluate()), flush=True)
    evaluate()
    return {"steps": steps, "tokens_seen": tokens, "seconds": round(time.monotonic() - start)}


def train_target(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, streams: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Train the target on the stories and leave it in OUT/target; returns what training cost."""
    target = new_model(TARGET_SIZES, config, tokenizer.eos_token_id)
    save_folder(target, tokenizer, config.out / "target")
    add_dropout_(target, config.dropout)
    validation_NL = windows(streams["validation"], 512)[:48]

    def evaluate() -> dict[str, float]:
        save_folder(target, tokenizer, config.out / "target")
        return {"validation_loss": held_out_loss(target, validation_NL)}

    def batches(length: int) -> Iterator[torch.Tensor]:
        return shuffled_batches(streams["train"], length, config.batch_tokens, config.seed)

    # Every eighth batch is full length, so that late positions are trained as well.
    mixed = interleave(batches(512), batches(config.max_len), period=8)
    return train_(
        target, lambda batch: next_token_loss(target, batch), mixed, config,
        seconds=60 * config.minutes_target, evaluate=evaluate,
    )  # fmt: skip


def train_draft(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, streams: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Distil the draft from OUT/target and leave it in OUT/draft; returns what training cost."""
    target = load_frozen(config.out / "target")
    draft = new_model(DRAFT_SIZES[config.draft_size], config, tokenizer.eos_token_id)
    written = write_corpus(target, streams["train"], seconds=60 * config.minutes_writing)
    print(json.dumps({"tokens_written_by_target": len(written)}), flush=True)
    validation_NL = windows(streams["validation"], 512)[:64]

    def evaluate() -> dict[str, float]:
        save_folder(draft, tokenizer, config.out / "draft")
        measured = agreement(draft, target, validation_NL)
        if (
            config.early_draft
            and not config.early_draft.exists()
            and measured["top1"] >= config.early_agreement
        ):
            save_folder(draft, tokenizer, config.early_draft)
        return measured

    # Alternate full-length stories with samples by the target.
    own_text = shuffled_batches(written, 256, config.batch_tokens, config.seed)
    stories = shuffled_batches(streams["train"], config.max_len, config.batch_tokens, config.seed)
    cost = train_(
        draft, lambda batch: distillation_loss(draft, target, batch, config.hard_weight),
        interleave(stories, own_text, period=2), config,
        seconds=60 * (config.minutes_draft - config.minutes_writing), evaluate=evaluate,
    )  # fmt: skip
    return cost | {"tokens_written_by_target": len(written)}


def measure(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, streams: dict[str, torch.Tensor]
) -> dict[str, object]:
    """What the shipped bf16 weights do on the test stories and on the target's own text, and two samples of
    it.
    """
    target = load_frozen(config.out / "target")
    draft = load_frozen(config.out / "draft")
    test_NL = windows(streams["test"], 512)[:96]
    prompt_NL = windows(streams["test"], 32)[:64]
    metrics: dict[str, object] = {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "test_tokens": test_NL.numel(),
        "target_test_loss": held_out_loss(target, test_NL),
        "draft_test_loss": held_out_loss(draft, test_NL),
        "draft_on_test_stories": agreement(draft, target, test_NL),
        "own_text_samples": len(prompt_NL),
    }
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        row_NL = write_on(target, prompt_NL, 256, torch.full((len(prompt_NL),), temperature))
        keep_NL = written_mask(row_NL, prompt_NL.shape[1], tokenizer.eos_token_id)
        texts = [row[1:][keep].tolist() for row, keep in zip(row_NL, keep_NL, strict=True)]
        metrics[f"draft_on_{name}_text_of_target"] = agreement(draft, target, row_NL, keep_NL)
        metrics[f"{name}_texts_that_loop"] = sum(map(is_loop, texts))
    prompt_BL = torch.tensor([tokenizer("Tom and Lily went to the park")["input_ids"]]).expand(2, -1)
    greedy, sampled = write_on(target, prompt_BL, 256, torch.tensor([0.0, 0.8])).tolist()
    metrics["greedy_story"] = tokenizer.decode(greedy).split(END)[0]
    metrics["sampled_story"] = tokenizer.decode(sampled).split(END)[0]
    return metrics


def main(config: TrainConfig, text: Path) -> None:
    """Split, tokenize, train both models, measure, and write OUT/metrics.json."""
    torch.manual_seed(config.seed)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for story in read_stories(text):
        parts[split_of(story)].append(story)
    for path, name, limit in ((config.calibration, "validation", 120), (config.prompts, "test", 60)):
        if path:
            write_stories(path, parts[name], limit)
    tokenizer = train_tokenizer(parts["train"], config.vocab_size, config.max_len)
    streams = {name: pack(tokenizer, stories) for name, stories in parts.items()}
    config.out.mkdir(parents=True, exist_ok=True)

    metrics_path = config.out / "metrics.json"
    metrics = json.loads(metrics_path.read_text()) if metrics_path.exists() else {}
    metrics["stories"] = {name: len(stories) for name, stories in parts.items()}
    metrics["tokens"] = {name: len(stream) for name, stream in streams.items()}
    metrics["machine"] = {"device": "cpu", "cores": os.cpu_count()}
    metrics["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(metrics), flush=True)
    if config.minutes_target:
        metrics["target_training"] = train_target(config, tokenizer, streams)
        metrics_path.write_text(json.dumps(metrics, indent=2) + "\n")
    if config.minutes_draft:
        metrics["draft_training"] = train_draft(config, tokenizer, streams)
    if (config.out / "draft").exists():
        metrics |= measure(config, tokenizer, streams)
    metrics_path.write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics), flush=True)


def parse_arguments() -> tuple[TrainConfig, Path]:
    """The command line; every default is TrainConfig's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    for name in (
        "minutes_target",
        "minutes_draft",
        "minutes_writing",
        "muon_lr",
        "adam_lr",
        "dropout",
        "eval_seconds",
    ):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(TrainConfig, name))
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--draft-size", choices=list(DRAFT_SIZES), default=TrainConfig.draft_size)
    for name in ("early_draft", "calibration", "prompts"):
        parser.add_argument("--" + name.replace("_", "-"), type=Path)
    arguments = vars(parser.parse_args())
    text = arguments.pop("text")
    return TrainConfig(**arguments), text


if __name__ == "__main__":
    main(*parse_arguments())
