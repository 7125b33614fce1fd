"""Models that would be decoded wrongly are refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_pair
from conftest import TINY

from yggdrasil.build import compile_pair
from yggdrasil.errors import ModelMismatch, UnsupportedModel
from yggdrasil.models.load import load_config

SIZES = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def refused_configs() -> dict[str, tuple[Any, str]]:
    """A configuration and what the error says about it."""
    import transformers as t

    return {
        "sliding window": (t.MistralConfig(**SIZES, sliding_window=128), "sliding window of 128"),
        "sliding layers": (t.Gemma2Config(**SIZES, head_dim=16), "layer type 'sliding_attention'"),
        "encoder-decoder": (t.T5Config(vocab_size=384, d_model=64, d_ff=64, num_layers=1, num_heads=2), "encoder-decoder"),
        "mixture of experts": (t.MixtralConfig(**SIZES), "mixture of experts"),
        "qwen3 mixture of experts": (t.Qwen3MoeConfig(**SIZES, moe_intermediate_size=32), "mixture of experts"),
        "state space": (t.MambaConfig(vocab_size=384, hidden_size=64, num_hidden_layers=1), "(without attention heads|layer type)"),
    }


@pytest.mark.parametrize("name", ("sliding window", "sliding layers", "encoder-decoder", "mixture of experts", "qwen3 mixture of experts", "state space"))
def test_refused_models(tmp_path: Path, name: str) -> None:
    config, feature = refused_configs()[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{tmp_path}: .*{feature}.* is not supported"):
        load_config(str(tmp_path))


def test_a_mistral_without_a_window_is_welcome(tmp_path: Path) -> None:
    import transformers as t

    t.MistralConfig(**SIZES, sliding_window=None).save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).model_type == "mistral"


def test_different_vocabularies_name_both_sizes_and_write_nothing(tmp_path: Path, ygg_home: Path, llama_folders: tuple[str, str]) -> None:
    import transformers as t

    t.LlamaConfig(**{**SIZES, "vocab_size": 500}).save_pretrained(tmp_path)
    calibration = tiny_pair.save_calibration(tmp_path / "text.txt")
    with pytest.raises(ModelMismatch, match="vocabulary size differs: the target has 384 tokens, the draft has 500 tokens"):
        compile_pair(llama_folders[0], str(tmp_path), name="mismatch", config=TINY, calibration=calibration, progress=tiny_pair.SilentProgress())
    assert not (ygg_home / "compile_cache" / "mismatch").exists()


def test_tokenizers_of_one_size_with_other_words_are_told_apart(tmp_path: Path, ygg_home: Path, llama_folders: tuple[str, str]) -> None:
    import transformers as t

    t.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    tokenizer = t.AutoTokenizer.from_pretrained(llama_folders[0])
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|end|>", "<|stop|>"))
    calibration = tiny_pair.save_calibration(tmp_path / "text.txt")
    with pytest.raises(ModelMismatch, match=r"tokenizer: token 0 differs: the target has '<\|end\|>', the draft has '<\|stop\|>'"):
        compile_pair(llama_folders[0], str(tmp_path), name="mismatch", config=TINY, calibration=calibration, progress=tiny_pair.SilentProgress())
    assert not (ygg_home / "compile_cache" / "mismatch").exists()
