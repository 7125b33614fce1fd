"""The trial of text that repeats: the target writes what is given, and the claim runs on a small pair."""

from __future__ import annotations

from argparse import Namespace

from bench.claim_graft import DRAFT_ARM, TASKS, edited_code, edited_story, measure_task, refuted_by, summary
from bench.lib.replay import replayed_pair
from yggdrasil.config import GenerateConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.state import PLAIN, Shape

STORY = "Tom saw a red fox. The fox ran to the river. Tom liked the fox. The owl saw Tom and the fox."


def test_edits_change_names_and_summaries_leave_sentences_out() -> None:
    assert edited_story("Tom saw Lily. Tomorrow came.") == "Zoe saw Zoe. Tomorrow came."
    assert edited_code("value = other + value") == "renamed = other + renamed"
    assert summary("One came. Two went! Three slept?") == "One came. Three slept?"


def test_a_replayed_target_writes_the_given_text_and_grafts_save_steps(tiny: LoadedPair) -> None:
    pair, target = replayed_pair(tiny)
    prompt = pair.tokenizer.encode(STORY)
    target.text = [*prompt, *prompt]
    config = GenerateConfig(max_new_tokens=len(prompt), ignore_eos=True)
    steps = {}
    for shape in (PLAIN, Shape(4, 4), Shape(4, 4, graft=3)):
        results = list(pair.engine.generate(prompt, pair.policy(shape=shape), config))
        assert [token for result in results for token in result.tokens] == prompt
        steps[shape.graft] = len(results)
    assert steps[3] < 0.7 * steps[0]


def test_a_rehearsal_compares_all_arms_on_text_that_repeats(
    tiny: LoadedPair, llama_folders: tuple[str, str]
) -> None:
    options = Namespace(prompts=1, tokens=4)  # the shortest codes fit the small context
    found = measure_task(tiny, llama_folders[0], "edited code", options, lambda line: None)
    assert {DRAFT_ARM, found["best_look_up"]} < set(found["grafts_over"])
    texts = [arm["same_text_as_plain"] for arm in found["arms"].values()]
    assert all(text["equal_prompts"] == 1 for text in texts)


def test_a_claim_is_refuted_by_every_limit_that_it_misses() -> None:
    over = {DRAFT_ARM: {"median": 1.25}, "look-up": {"median": 1.15}}
    found = {name: {"grafts_over": over, "best_look_up": "look-up"} for name in TASKS}
    found["stories"] = {"grafts_over": {DRAFT_ARM: {"median": 0.994}}}
    missed = [f"{name}: {arm}" for name in TASKS for arm in (DRAFT_ARM, "look-up")]
    assert refuted_by(found) == [*missed, f"stories: {DRAFT_ARM}"]


def test_a_claim_holds_at_its_limits() -> None:
    over = {DRAFT_ARM: {"median": 1.3}, "look-up": {"median": 1.2}}
    found = {name: {"grafts_over": over, "best_look_up": "look-up"} for name in TASKS}
    found["stories"] = {"grafts_over": {DRAFT_ARM: {"median": 0.995}}}
    assert refuted_by(found) == []
