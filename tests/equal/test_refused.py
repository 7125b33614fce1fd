"""Models that would be decoded wrongly are refused before anything is written."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
from conftest import TINY

from yggdrasil.config import CompileConfig
from yggdrasil.errors import ConfigError, ModelMismatch, UnsupportedModel
from yggdrasil.models import hub
from yggdrasil.models.load import load_config
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.offline.inputs import max_context
from yggdrasil.offline.pipeline import compile_pair

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def refused_configs() -> dict[str, tuple[Any, str]]:
    """A configuration and what the error contains about it."""
    import transformers as t

    hqq = {"quant_method": "hqq"}
    return {
        "soft caps": (t.Gemma2Config(**SIZES, head_dim=16), "soft-capped attention scores"),
        "encoder-decoder": (
            t.T5Config(vocab_size=384, d_model=64, d_ff=64, num_layers=1, num_heads=2),
            "encoder-decoder",
        ),
        "mixture of experts": (t.MixtralConfig(**SIZES), "mixture of experts"),
        "qwen3 mixture of experts": (
            t.Qwen3MoeConfig(**SIZES, moe_intermediate_size=32),
            "mixture of experts",
        ),
        "state space": (
            t.MambaConfig(vocab_size=384, hidden_size=64, num_hidden_layers=1),
            "(without attention heads|layer type)",
        ),
        "latent attention": (t.MiniCPM3Config(**SIZES), "latent attention"),
        "chunks": (t.LlamaConfig(**SIZES, attention_chunk_size=64), "attention in chunks"),
        "hybrid": (t.Qwen3NextConfig(**SIZES), "layer type 'linear_attention'"),
        "alibi": (
            t.BloomConfig(vocab_size=384, hidden_size=64, n_layer=2, n_head=4),
            "BloomForCausalLM, whose attention cannot be replaced,",
        ),
        "own attention": (
            t.BioGptConfig(vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
            "attention cannot be replaced,",
        ),
        "quantised": (t.LlamaConfig(**SIZES, quantization_config=hqq), r"quantized weights \(hqq\)"),
        "multimodal": (t.Gemma3Config(), "multimodal"),
        "heads of 24": (t.LlamaConfig(**{**SIZES, "hidden_size": 96}), "head dimension of 24"),
    }


@pytest.mark.parametrize("name", (
    "soft caps", "encoder-decoder", "mixture of experts", "qwen3 mixture of experts", "state space",
    "latent attention", "chunks", "hybrid", "alibi", "own attention", "quantised", "multimodal",
    "heads of 24",
))  # fmt: skip
def test_a_model_that_is_not_supported_is_refused_by_its_feature(tmp_path: Path, name: str) -> None:
    config, feature = refused_configs()[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{tmp_path}: .*{feature}.* is not supported"):
        load_config(str(tmp_path))


def settled(config: CompileConfig, **models: Any) -> int:
    return max_context(config, models)


def test_a_sliding_window_as_long_as_the_context_and_a_tree_is_none() -> None:
    import transformers as t

    depth = TINY.path_depth
    mistral = t.MistralConfig(**SIZES, sliding_window=4096, max_position_embeddings=32768)
    assert settled(CompileConfig(), mistral=mistral) == 2048  # what Mistral 7B asks for
    for window, fits in ((256 + depth, True), (256 + depth - 1, False)):
        models = {
            "mistral": t.MistralConfig(**SIZES, sliding_window=window, max_position_embeddings=4096),
            "starcoder2": t.Starcoder2Config(**SIZES, sliding_window=window, max_position_embeddings=4096),
            "phi3": t.Phi3Config(
                **SIZES, pad_token_id=0, sliding_window=window, max_position_embeddings=4096
            ),
            "qwen2": t.Qwen2Config(
                **SIZES,
                use_sliding_window=True,
                max_window_layers=1,
                sliding_window=window,
                max_position_embeddings=4096,
            ),
        }
        for name, config in models.items():
            if fits:
                assert settled(TINY, **{name: config}) == 256
            else:
                with pytest.raises(
                    ConfigError,
                    match=f"at most 240: {name} has a sliding window of {window} .*--max-context 240",
                ):
                    settled(TINY, **{name: config})
    # it does not use it
    assert (
        settled(TINY, qwen2=t.Qwen2Config(**SIZES, sliding_window=16, max_position_embeddings=4096)) == 256
    )
    with pytest.raises(UnsupportedModel, match="narrow: a sliding window of 16 tokens is not supported"):
        settled(
            TINY,
            llama=t.LlamaConfig(**SIZES),
            narrow=t.MistralConfig(**SIZES, sliding_window=16, max_position_embeddings=4096),
        )


def test_the_context_ends_where_rotary_embeddings_would_change() -> None:
    import transformers as t

    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
    }
    phi = t.Phi3Config(
        **SIZES,
        pad_token_id=0,
        max_position_embeddings=1024,
        original_max_position_embeddings=128,
        rope_parameters=longrope,
    )
    with pytest.raises(
        ConfigError,
        match="at most 112: phi has 'longrope' rotary embeddings that change beyond 128 positions, "
        ".*--max-context 112",
    ):
        settled(TINY, phi=phi)
    assert settled(replace(TINY, max_context=112), phi=phi) == 112
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    llama = t.LlamaConfig(**SIZES, max_position_embeddings=128, rope_parameters=dynamic)
    with pytest.raises(ConfigError, match="at most 112"):
        settled(TINY, llama=llama)
    assert settled(replace(TINY, max_context=None), llama=llama) == 112


def test_a_model_that_brings_its_own_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("standard input was read"))
    auto_map = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    with pytest.raises(UnsupportedModel, match="code of its own"):
        load_config(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
        )
    )
    with pytest.raises((UnsupportedModel, ConfigError)):
        load_tokenizer(str(tmp_path))


def test_code_that_transformers_has_itself_is_preferred_to_a_model_s_own(tmp_path: Path) -> None:
    import transformers as t

    t.LlamaConfig(**SIZES, auto_map={"AutoConfig": "configuration_mine.MineConfig"}).save_pretrained(
        tmp_path
    )
    assert load_config(str(tmp_path)).model_type == "llama"


@pytest.mark.parametrize("name", ("./nowhere", "../nowhere", "a/b/c", "two words"))
def test_what_is_no_folder_and_no_id_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match=f"model: '{name}' .*; there is no such folder"):
        load_config(name)


def test_a_hub_that_does_not_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "getproxies", dict)
    hub._hub_answers.cache_clear()
    start = time.perf_counter()
    with pytest.raises(
        ConfigError,
        match="model: 'nobody/nothing' is not allowed; it must be a folder "
        ".*the hub does not answer, .*not downloaded before",
    ):
        load_config("nobody/nothing")
    hub._hub_answers.cache_clear()
    assert time.perf_counter() - start < 3  # with retries half a minute
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # for the processes that build graphs


@pytest.mark.parametrize("proxy", ("http://127.0.0.1:abc", "127.0.0.1:9", "http://127.0.0.1:99999"))
def test_a_proxy_that_does_not_answer_is_a_hub_that_does_not(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": proxy})
    hub._hub_answers.cache_clear()
    assert not hub._hub_answers()
    hub._hub_answers.cache_clear()


def test_a_proxy_may_leave_out_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "getproxies", lambda: {"https": f"127.0.0.1:{proxy.getsockname()[1]}"})
        hub._hub_answers.cache_clear()
        assert hub._hub_answers()
    hub._hub_answers.cache_clear()


def test_different_vocabularies_name_both_sizes_and_write_nothing(
    tmp_path: Path, ygg_home: Path, llama_folders: tuple[str, str]
) -> None:
    import transformers as t

    t.LlamaConfig(**{**SIZES, "vocab_size": 500}).save_pretrained(tmp_path)
    calibration = tiny_pair.save_calibration(tmp_path / "text.txt")
    with pytest.raises(
        ModelMismatch, match="vocabulary size differs: the target has 384 tokens, the draft has 500 tokens"
    ):
        compile_pair(
            llama_folders[0],
            str(tmp_path),
            name="mismatch",
            config=TINY,
            calibration=calibration,
            progress=tiny_pair.SilentProgress(),
        )
    assert not (ygg_home / "compile_cache" / "mismatch").exists()


def test_tokenizers_of_equal_size_with_different_words_are_refused(
    tmp_path: Path, ygg_home: Path, llama_folders: tuple[str, str]
) -> None:
    import transformers as t

    t.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    tokenizer = t.AutoTokenizer.from_pretrained(llama_folders[0])
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|end|>", "<|stop|>"))
    calibration = tiny_pair.save_calibration(tmp_path / "text.txt")
    with pytest.raises(
        ModelMismatch,
        match=r"tokenizer: token 0 differs: the target has '<\|end\|>', the draft has '<\|stop\|>'",
    ):
        compile_pair(
            llama_folders[0],
            str(tmp_path),
            name="mismatch",
            config=TINY,
            calibration=calibration,
            progress=tiny_pair.SilentProgress(),
        )
    assert not (ygg_home / "compile_cache" / "mismatch").exists()
