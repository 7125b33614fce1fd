"""The page of all trees: every step, no script, nothing from elsewhere."""

from __future__ import annotations

import re
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


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that can be written"):
        write_page("", tmp_path / "none" / "page.html")
