"""What the claims measure with: uncompiled models write what they write plainly, counts and times are
those of the steps, tuning takes the best.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_pair

from bench.lib.arms import PLAIN_ARM, fixed_policy, plain_arm, policy_arm, ratios_to
from bench.lib.counting import Counter, candidates
from bench.lib.eager import eager_engine
from bench.lib.harness import TextMismatchError, interleave
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.baselines import dynamic_sequence, equal_growth, k_ary, sequence, structure_ms
from yggdrasil.state import PLAIN, Shape

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(tiny: LoadedPair) -> list[list[int]]:
    return [tiny.tokenizer.encode(text)[:12] for text in tiny_pair.stories(2, seed=5)]


@pytest.fixture(scope="module")
def counter(tiny: LoadedPair, prompts: list[list[int]]) -> Counter:
    return Counter(tiny, tiny.latency, prompts, num_tokens=NUM_TOKENS)


def test_uncompiled_trees_write_what_uncompiled_plain_decoding_writes(
    tiny: LoadedPair, prompts: list[list[int]]
) -> None:
    eager = replace(tiny, engine=eager_engine(tiny.bundle))
    shapes = {"tree": equal_growth(4, 4, 16), "static": k_ary(2, 3)}
    arms = [
        plain_arm(eager, NUM_TOKENS),
        *(policy_arm(name, eager, fixed_policy(tiny, shape), NUM_TOKENS) for name, shape in shapes.items()),
    ]
    rounds = interleave(arms, prompts, reference=PLAIN_ARM)
    assert max(each.aal for each in rounds.by_arm["tree"]) > 1.5
    assert set(ratios_to(rounds, "tree")) == {PLAIN_ARM, "static"}


def test_plain_decoding_counts_as_itself(counter: Counter) -> None:
    plain = counter.count(PLAIN)
    assert (plain.tokens, plain.passes, plain.aal) == (2 * NUM_TOKENS, 2 * NUM_TOKENS, 1.0)
    assert plain.speedup == pytest.approx(1.0)


@pytest.mark.parametrize("shape", (sequence(4), k_ary(2, 2), equal_growth(4, 2, 8)), ids=str)
def test_a_count_takes_the_time_of_the_profile(tiny: LoadedPair, counter: Counter, shape: Shape) -> None:
    count = counter.count(shape)
    assert count.aal > 1
    # linear between them; a noisy machine's profile need not rise
    contexts = tiny.latency.verify.contexts
    widths = range(1, shape.num_nodes + 1)
    times = [
        structure_ms(shape, tiny.latency, verified=verified, context_len=context)
        for context in contexts
        for verified in widths
    ]
    assert min(times) * count.passes <= count.ms <= max(times) * count.passes


def test_a_chain_that_stops_early_takes_the_time_of_what_it_drafted(counter: Counter) -> None:
    timid = counter.count(dynamic_sequence(4, 1.0))
    bold = counter.count(dynamic_sequence(4, 1e-9))
    assert timid.ms / timid.passes < bold.ms / bold.passes
    assert bold.passes == counter.count(sequence(4)).passes
    assert timid.passes == counter.count(sequence(1)).passes


def test_tuning_takes_the_structure_with_the_largest_speedup(counter: Counter) -> None:
    shapes = {str(shape): shape for shape in (sequence(1), sequence(2), sequence(4))}
    speedups = {name: counter.count(shape).speedup for name, shape in shapes.items()}
    assert speedups[counter.best(shapes)] == max(speedups.values())


def test_a_text_that_is_not_plain_decodings_is_not_counted(
    tiny: LoadedPair, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(tiny, tiny.latency, prompts, num_tokens=NUM_TOKENS)
    monkeypatch.setattr(counter, "_texts", [[0]] * len(prompts))
    with pytest.raises(TextMismatchError):
        counter.count(PLAIN)


@pytest.mark.parametrize("structure", ("sequence", "DISCO", "K-ary", "OPT-Tree"))
def test_candidates_fit_the_menu(tiny: LoadedPair, structure: str) -> None:
    config = tiny.bundle.config
    for verify in (None, 8):
        shapes = candidates(structure, tiny, verify=verify).values()
        assert len(shapes) > 1
        assert all(
            shape.depth <= config.max_depth and (shape.verify or 0) <= (verify or config.verify_widths[-1])
            for shape in shapes
        )
