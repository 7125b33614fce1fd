"""The pair of real size that compilation is timed on: its shape, small."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from bench.qwen_shaped import save_pair
from yggdrasil.models.load import check_vocabularies, load_config
from yggdrasil.offline.inputs import common_ids


def test_the_pair_has_one_tokenizer_as_large_as_its_vocabulary(tmp_path: Path) -> None:
    save_pair(
        tmp_path,
        vocab=700,
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    configs = [load_config(str(tmp_path / name)) for name in ("target", "draft")]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert len(tokenizer) == 700
    check_vocabularies(*configs, common_ids(tokenizer, str(tmp_path / "draft"), configs[0].vocab_size))
    text = "Once upon a time there was a café."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = AutoConfig.from_pretrained(tmp_path / "target")
    assert (str(config.dtype), config.tie_word_embeddings, config.num_hidden_layers) == (
        "torch.bfloat16",
        True,
        1,
    )
