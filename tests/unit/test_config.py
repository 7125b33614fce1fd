"""Every option that is not allowed is refused by name and value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from yggdrasil.config import (
    WEIGHTS,
    CompileConfig,
    GenerateConfig,
    ProcessorConfig,
    SamplingConfig,
    ServeConfig,
    from_dict,
)
from yggdrasil.errors import ConfigError, YggError

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SamplingConfig, "temperature", -0.5),
        (SamplingConfig, "temperature", NAN),
        (SamplingConfig, "temperature", INF),
        (SamplingConfig, "top_p", 0),
        (SamplingConfig, "top_p", 1.5),
        (SamplingConfig, "top_p", NAN),
        (SamplingConfig, "top_k", -1),
        (SamplingConfig, "min_p", -0.1),
        (SamplingConfig, "min_p", 1.1),
        (SamplingConfig, "min_p", NAN),
        (SamplingConfig, "seed", -1),
        (SamplingConfig, "seed", 2**63),
        (SamplingConfig, "seed", 0.5),
        (SamplingConfig, "top_k", 2.5),
        (ProcessorConfig, "min_tokens", -1),
        (ProcessorConfig, "min_tokens", 2**31),  # a number beyond 64 bits fails in the step, for all rows
        (ProcessorConfig, "min_tokens", 1.5),
        (ProcessorConfig, "no_repeat_ngram_size", -1),
        (ProcessorConfig, "no_repeat_ngram_size", 10**30),
        (ProcessorConfig, "no_repeat_ngram_size", 3.0),
        (GenerateConfig, "max_new_tokens", 0),
        (GenerateConfig, "max_new_tokens", -3),
        (GenerateConfig, "stop", ("ok", "")),
        (CompileConfig, "dtype", "float16"),
        (CompileConfig, "device", "tpu"),
        (CompileConfig, "exact", False),
        (CompileConfig, "max_context", 100),
        (CompileConfig, "max_context", 16),
        (CompileConfig, "max_context", -16),
        (CompileConfig, "widths", ()),
        (CompileConfig, "widths", (4, 2)),
        (CompileConfig, "widths", (0, 2)),
        (CompileConfig, "verify_widths", (4, 4)),
        (CompileConfig, "max_depth", 0),
        (CompileConfig, "prefill_chunk", 1),
        (CompileConfig, "prefill_chunk", 64),  # as many as the largest verified width
        (CompileConfig, "num_candidates", 7),
        (CompileConfig, "calibration_texts", 0),
        (CompileConfig, "calibration_tokens", 0),
        (CompileConfig, "calibration_budget_s", 0.0),
        (CompileConfig, "calibration_budget_s", NAN),
        (CompileConfig, "calibration_budget_s", INF),
        (ServeConfig, "port", -1),
        (ServeConfig, "port", 2**16),
        (ServeConfig, "drain_seconds", -1.0),
        (ServeConfig, "drain_seconds", NAN),
        (ServeConfig, "drain_seconds", INF),
    ],
)
def test_an_option_that_is_not_allowed_is_refused_by_name_and_value(
    kind: Any, field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {value!r} is not allowed; it must be ")


@pytest.mark.parametrize("kind", (SamplingConfig, GenerateConfig, CompileConfig, ServeConfig))
def test_defaults_are_allowed_and_frozen(kind: Any) -> None:
    config = kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_the_limits_themselves_are_allowed() -> None:
    SamplingConfig(temperature=0.0, top_k=0, top_p=1.0, min_p=1.0, seed=2**63 - 1)
    GenerateConfig(max_new_tokens=1)
    CompileConfig(device="cuda", exact=False)
    CompileConfig(
        max_context=32, widths=(1,), verify_widths=(1,), num_candidates=1, prefill_chunk=2, max_depth=1
    )


@pytest.mark.parametrize("other", ({"dtype": "float32"}, {"device": "cuda"}, {"ranks": 2}))
def test_compression_is_refused_where_it_would_not_apply(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="compress: True is not allowed"):
        CompileConfig(compress=True, **other)
    CompileConfig(compress=False, **other)


@pytest.mark.parametrize("name", ("weights", "draft_weights"))
@pytest.mark.parametrize("other", ({"device": "cuda"}, {"ranks": 2}))
def test_weights_are_rounded_on_a_cpu_in_one_process_alone(name: str, other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name}: 'int4' is not allowed; it must be bf16"):
        CompileConfig(**{name: "int4"}, **other)
    CompileConfig(**{name: "bf16"}, **other)
    with pytest.raises(ConfigError, match=f"{name}: 'int3' is not allowed; it must be one of bf16, int8, "):
        CompileConfig(**{name: "int3"})


def test_rounded_weights_of_both_models_leave_nothing_to_compress() -> None:
    with pytest.raises(ConfigError, match="compress: True is not allowed"):
        CompileConfig(compress=True, weights="int8", draft_weights="int4")
    CompileConfig(compress=True, weights="int8")


def test_pairs_that_differ_in_rounding_have_names_and_fingerprints_of_their_own() -> None:
    configs = [
        CompileConfig(weights=weights, draft_weights=draft_weights)
        for weights in WEIGHTS
        for draft_weights in WEIGHTS
    ]
    assert CompileConfig().rounded == ""
    assert CompileConfig(weights="int8", draft_weights="int4").rounded == "-int8-draft-int4"
    assert len({config.rounded for config in configs}) == len(configs)
    assert len({str(config.lowering) for config in configs}) == len(configs)


def test_a_prefill_chunk_is_wider_than_any_draft_and_any_verification() -> None:
    with pytest.raises(
        ConfigError, match="prefill_chunk: 8 is not allowed; it must be above 8, the largest of "
    ):
        CompileConfig(widths=(1, 8), verify_widths=(4,), prefill_chunk=8)
    CompileConfig(widths=(1, 8), verify_widths=(4,), prefill_chunk=9)


def test_from_dict_gives_a_saved_config_back() -> None:
    config = CompileConfig(widths=(1, 3), max_context=64)
    assert (
        from_dict(
            CompileConfig,
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in dataclasses.asdict(config).items()
            },
        )
        == config
    )


def test_from_dict_refuses_an_unknown_key() -> None:
    with pytest.raises(
        ConfigError, match="CompileConfig: 'width' is not allowed; it must be one of .*'widths'"
    ):
        from_dict(CompileConfig, {"width": [1]})


def test_config_errors_are_user_errors_and_value_errors() -> None:
    assert issubclass(ConfigError, YggError)
    assert issubclass(ConfigError, ValueError)


def test_most_nodes_of_a_tree_follow_from_the_menu() -> None:
    assert CompileConfig(widths=(1, 4), max_depth=3, verify_widths=(4, 8)).max_nodes == 13 + 8
