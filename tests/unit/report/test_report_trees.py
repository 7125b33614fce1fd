"""The page of all trees: every step, no script, nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair
from yggdrasil.report.trees import trees_page, write_page


def test_the_page_has_the_tree_of_every_step_and_needs_nothing_else(tiny: LoadedPair) -> None:
    prompt = tiny.tokenizer.encode("Once <b>upon")
    sampling = SamplingConfig(temperature=0.7, seed=3)
    config = GenerateConfig(max_new_tokens=24, ignore_eos=True, inspect=True, sampling=sampling)
    policy = tiny.policy(temperature=0.7, guard=False)
    results = list(tiny.engine.generate(prompt, policy, config))
    page = trees_page(tiny, prompt, sampling, results)
    assert page.count("<svg") == 1 + len(results)  # the legend, too
    assert page.count("<section>") == len(results) > 1
    assert "temperature 0.7, seed 3, without a guard" in page
    assert "&lt;b&gt;" in page
    assert re.search(r"<script|<b>|\ssrc=|\shref=", page) is None
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}


def test_the_page_ends_with_a_character_that_is_not_whole(tiny: LoadedPair) -> None:
    prompt = tiny.tokenizer.encode("Once")
    config = GenerateConfig(max_new_tokens=1, ignore_eos=True)
    [result] = tiny.engine.generate(prompt, tiny.policy(), config)
    begun = tiny.tokenizer.encode(" ab\u2603", special_tokens=False)[:-1]
    page = trees_page(tiny, prompt, SamplingConfig(), [replace(result, tokens=begun)])
    assert tiny.tokenizer.decode(begun).endswith("\ufffd")
    assert f'<span class="prompt">Once</span>{tiny.tokenizer.decode(begun)}</p>' in page


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that can be written"):
        write_page("", tmp_path / "none" / "page.html")
