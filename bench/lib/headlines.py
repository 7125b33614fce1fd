"""The one number of each claim that `bench/RESULTS.md` shows, and whether the claim held.

What refutes a claim stands in the docstring of its script; here it is read from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CLAIMS", "Claimed", "Headline"]

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Headline:
    """The number of one result.

    Args:
        value: As it was measured.
        wanted: What the claim asks of it, such as "1.6" or "<= 1.03"; empty where it asks nothing.
        held: Whether the whole claim held.
        interval: 95 % interval of the value; None where the result has none.
        missed: Goals that were missed, and how many there are; None for a claim with one goal.
    """

    value: float
    wanted: str
    held: bool
    interval: tuple[float, float] | None = None
    missed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Claimed:
    """A row of the table.

    Args:
        number: What the value is, in words.
        read: From a result to its headline.
        serves: Whether it measures the server, and not decoding alone.
    """

    number: str
    read: Callable[[Result], Headline]
    serves: bool = False


def _ratio(
    ratio: Mapping[str, Any], wanted: str, held: bool, missed: tuple[int, int] | None = None
) -> Headline:
    low, high = ratio["ci95"]
    return Headline(ratio["median"], wanted, held, (low, high), missed)


def _goals(result: Result) -> tuple[bool, tuple[int, int]]:
    goals = result["goals"]
    goals = list(goals.values() if isinstance(goals, Mapping) else goals)
    missed = sum(not goal["reached"] for goal in goals)
    return missed == 0, (missed, len(goals))


def _never_below_1(ratios: Iterable[Mapping[str, Any]]) -> bool:
    """Refuted by a ratio that is below 1 with its whole interval."""
    return all(ratio["ci95"][1] >= 1 for ratio in ratios)


def _single_stream(result: Result) -> Headline:
    goal = result["goals"]["tree_over_plain"]
    return _ratio(result["ratios"]["tree_over_plain"], f"{goal['wanted']}", *_goals(result))


def _peers(result: Result) -> Headline:
    """The closest of the formats of weights."""
    name = "speculative_over_best_peer_speculative"
    blocks = list(result.get("formats", {"bf16": result}).values())
    closest = min(blocks, key=lambda block: block["ratios"][name]["median"])
    counts = [_goals(block)[1] for block in blocks]
    missed = (sum(each[0] for each in counts), sum(each[1] for each in counts))
    return _ratio(closest["ratios"][name], f"{closest['goals'][name]['wanted']}", missed[0] == 0, missed)


def _roofline(result: Result) -> Headline:
    held, missed = _goals(result)
    ms = {each["size"]: each["ms"]["median"] for each in result["verify"] if each["context"] == 512}
    wanted = [goal["wanted"] for goal in result["goals"] if goal["goal"] == "T(16)/T(2) at context 512"]
    return Headline(ms[16] / ms[2], "".join(wanted), held, missed=missed)


def _long(result: Result) -> Headline:
    arms = list(result["arms"].values())
    clean = all(arm["compilations"] == 0 and arm["stalls"] == 0 for arm in arms)
    stall = max(arm["longest_stall_ms"] for arm in arms)
    return Headline(stall, "< 20", bool(result["same_text"]) and clean)


def _exact(result: Result) -> Headline:
    differing = sum(comparison["texts_that_differ"] for comparison in result["comparisons"])
    return Headline(differing, "0", differing == 0)


def _memory(result: Result) -> Headline:
    ratio = result["ratio_over_weights_after_caches"]
    return Headline(ratio, "< 1.3", ratio < 1.3)


def _start(result: Result) -> Headline:
    first_s = result["first_wall_ms"] / 1e3
    later_s = (result["later_startup_ms"] + result["later_ttft_ms"]) / 1e3
    held = first_s <= 240 and later_s <= 5 and result["later_compilations"] == 0
    return Headline(first_s, "<= 240", held)


def _runtimes(result: Result) -> Headline:
    closest = min(result["plain_over"].values(), key=lambda ratio: ratio["median"])
    return _ratio(closest, "> 1", bool(result["reached"]))


def _verify_width(result: Result) -> Headline:
    growth = result["verify_widest_over_narrowest"]["64"]
    return Headline(growth, "> 1", growth > 1)


def _end_to_end(result: Result) -> Headline:
    ratios = [
        ratio
        for draft in result["drafts"].values()
        for workload in draft["workloads"].values()
        for ratio in workload["ours_over"].values()
    ]
    missed = sum(ratio["ci95"][1] < 1 for ratio in ratios)
    others = {name: mean for name, mean in result["geometric_mean_ours_over"].items() if name != "plain"}
    return Headline(min(others.values()), "1", missed == 0, missed=(missed, len(ratios)))


def _structures(result: Result) -> Headline:
    ours = ("equal growth", "equal growth, by AAL")
    lowest = min(
        speedups["equal growth"] / max(value for name, value in speedups.items() if name not in ours)
        for speedups in result["best_speedup_eq3"].values()
    )
    return Headline(lowest, "1", lowest >= 1)


def _breakdown(result: Result) -> Headline:
    last = list(result["factors"])[-1]
    return _ratio(result["over_plain"][last], "", _never_below_1(result["factors"].values()))


def _sensitivity(result: Result) -> Headline:
    ratio = result["default_over_best_cell"]
    return Headline(ratio, "<= 1.1", ratio <= 1.1)


def _objective(result: Result) -> Headline:
    ratios = [workload["speedup_over"]["AAL"] for workload in result["workloads"].values()]
    return Headline(result["geometric_mean_speedup_over"]["AAL"], "1", _never_below_1(ratios))


def _temperature(result: Result) -> Headline:
    ratios = [ratio for each in result["temperatures"].values() for ratio in each["ours_over"].values()]
    return Headline(result["geometric_mean_ours_over"]["Sequoia"], "1", _never_below_1(ratios))


def _graft(result: Result) -> Headline:
    """The closest of the texts that repeat."""
    texts = [
        text["grafts_over"]["draft alone"] for name, text in result["texts"].items() if name != "stories"
    ]
    return _ratio(min(texts, key=lambda ratio: ratio["median"]), "1.3", not result["refuted_by"])


def _constrained(result: Result) -> Headline:
    """The smallest gain of speculation at any temperature."""
    found = list(result["temperatures"].values())
    goals = [held for each in found for held in each["goals"].values()]
    lowest = min((each["speculative_over_plain"] for each in found), key=lambda ratio: ratio["median"])
    return _ratio(lowest, "1.5", all(goals), (goals.count(False), len(goals)))


def _quantised(result: Result) -> Headline:
    """Tokens a second of the tree in int4, over those in bf16; the claim asks nothing of it."""
    rates = {
        name: found["temperatures"]["0"]["arms"]["tree"]["tok_per_s"]
        for name, found in result["formats"].items()
    }
    held = [goal["reached"] for goal in result["goals"]]
    gain = rates["int4"] / rates["bf16"]
    return Headline(round(gain, 3), "", all(held), missed=(held.count(False), len(held)))


def _no_draft(result: Result) -> Headline:
    """The smallest gain of any target at temperature 0."""
    gains = [each["temperatures"]["0"]["over_plain"]["chosen draft"] for each in result["targets"].values()]
    smallest = min(gains, key=lambda ratio: ratio["median"])
    return _ratio(smallest, result["goals"][0]["wanted"], *_goals(result))


def _depth(result: Result) -> Headline:
    lowest = min(
        (
            text["chosen_over"]["fixed"]
            for text in result["texts"].values()
            if "fixed" in text["chosen_over"]
        ),
        key=lambda ratio: ratio["median"],
    )
    return _ratio(lowest, "1", not result["refuted_by"])


def _predictor(result: Result) -> Headline:
    """The smallest skill over a constant at any depth with enough events."""
    held, missed = _goals(result)
    skills = [goal["measured"] for name, goal in result["goals"].items() if name.startswith("skill")]
    return Headline(min(skills), "> 0", held, missed=missed)


def _serving(result: Result) -> Headline:
    verdict = result["verdict"]
    trace = verdict.get("trace", {})
    loads = [trace] if "best_fixed" in trace else list(trace.values())
    held = all(
        load["throughput_over_best_fixed"]["median"] >= 1.05
        and load["throughput_over_best_baseline"]["median"] > 1
        for load in loads
    )
    rates = verdict.get("rates", {})
    for name, rate in rates.items():
        held &= rate["throughput_over_best_fixed"]["median"] >= 0.98
        if name == max(rates, key=float):
            held &= rate["throughput_over_off"]["median"] >= 0.99
    lowest = min(loads, key=lambda load: load["throughput_over_best_fixed"]["median"])
    found = lowest["throughput_over_best_fixed"]
    return Headline(found["median"], "1.05", held, (min(found["rounds"]), max(found["rounds"])))


def _batched_trees(result: Result) -> Headline:
    """The smallest lead of trees over chains of the same policy at any batch."""
    found = [each for sizes in result["temperatures"].values() for each in sizes.values()]
    chains = [each["trees_over"]["the same policy, W = 1"] for each in found]
    plain = [each["trees_over"]["plain"] for each in found]
    alone = [sizes["1"] for sizes in result["temperatures"].values()]
    goals = [ratio["ci95"][1] >= 0.99 for ratio in (*chains, *plain)]
    goals += [each["trees_over"]["ygg generate"]["median"] >= 0.97 for each in alone]
    goals += [each["plain_over_alone_plain"]["median"] >= 0.97 for each in alone]
    widest = [sizes["16"] for sizes in result["temperatures"].values()]
    goals += [each["arms"]["trees"]["host_share"] < 0.08 for each in widest]
    lowest = min(chains, key=lambda each: each["median"])
    return _ratio(lowest, "0.99", all(goals), (goals.count(False), len(goals)))


def _bandits(result: Result) -> Headline:
    goals = [
        goal
        for entry in result["held"].values()
        for goal in (entry.values() if isinstance(entry, Mapping) else [entry])
    ]
    missed = sum(not goal for goal in goals)
    return Headline(
        result["selection_us"]["nightjar"]["median"], "< 20", missed == 0, missed=(missed, len(goals))
    )


def _elastic(result: Result) -> Headline:
    rates = sorted(result["verdict"], key=float)
    lowest = result["verdict"][rates[0]]["throughput_over_static"]
    highest = result["verdict"][rates[-1]]["throughput_over_static"]
    turns = result["verdict"][rates[-1]]["turns"]
    return Headline(highest, "1.05", highest >= 1.05 and lowest >= 0.99, (min(turns), max(turns)))


def _soak(result: Result) -> Headline:
    missed = sum(not held for held in result["held"].values())
    return Headline(
        result["rss_growth_after_first_quarter"],
        "<= 1.05",
        missed == 0,
        missed=(missed, len(result["held"])),
    )


def _guard(result: Result) -> Headline:
    cases = [*result["cases"].values(), *result.get("server", {}).values()]
    held = all(case["held"] for case in cases)
    return _ratio(
        result["cases"]["shuffled draft"]["time_over_plain"]["guarded"], f"<= {result['allowed']}", held
    )


def _wrong_profiles(result: Result) -> Headline:
    """The smallest share of the right profile's throughput that the learning policy reaches."""
    shares = [
        policies["learns"]
        for found in result["sizes"].values()
        for profile, policies in found.items()
        if profile not in ("right", "tok_per_s")
    ]
    missed = sum(not held for held in result["held"].values())
    return Headline(min(shares), "0.97", missed == 0, missed=(missed, len(result["held"])))


def _contended(result: Result) -> Headline:
    goals = [
        held for pair in result["pairs"].values() for held in pair["held"].values() if held is not None
    ]
    missed = goals.count(False)
    lowest = min(
        (pair["of_idle"]["2"] for pair in result["pairs"].values()), key=lambda ratio: ratio["median"]
    )
    return _ratio(lowest, "0.35", missed == 0, (missed, len(goals)))


def _calibration(result: Result) -> Headline:
    found = [each for pair in result["pairs"].values() for each in pair["temperatures"].values()]
    missed = sum(not each["held"] for each in found)
    lowest = min((each["batched_over_one_by_one"] for each in found), key=lambda ratio: ratio["median"])
    return _ratio(lowest, "0.99", missed == 0, (missed, len(found)))


def _architectures(result: Result) -> Headline:
    known = ("equal", "refused", "not built small")
    wrong = sum(count for kind, count in result["counts"].items() if kind not in known)
    return Headline(wrong, "0", wrong == 0)


CLAIMS = {
    "single_stream": Claimed("tree over plain decoding", _single_stream),
    "peers": Claimed("our tree over the fastest other engine", _peers),
    "exact": Claimed("texts that differ from plain decoding", _exact),
    "guard": Claimed("time over plain decoding, useless draft", _guard),
    "contended": Claimed("speed next to two busy processes, of idle", _contended),
    "start": Claimed("seconds of the first start", _start),
    "memory": Claimed("resident memory over the weights", _memory),
    "long": Claimed("longest stall, ms", _long),
    "roofline": Claimed("T(16) over T(2)", _roofline),
    "calibration": Claimed("batched over one-by-one calibration", _calibration),
    "architectures": Claimed("architectures decoded wrongly", _architectures),
    "runtimes": Claimed("plain decoding over the next runtime", _runtimes),
    "verify_width": Claimed("T_verify(64) over T_verify(1)", _verify_width),
    "end_to_end": Claimed("default policy over the closest structure", _end_to_end),
    "structures": Claimed("Eq. 3 speedup over the closest structure", _structures),
    "breakdown": Claimed("all optimisations over plain decoding", _breakdown),
    "sensitivity": Claimed("default policy over the best cell, time", _sensitivity),
    "objective": Claimed("Eq. 3 over AAL as objective", _objective),
    "temperature": Claimed("default policy over Sequoia's tree", _temperature),
    "constrained": Claimed("speculation over plain decoding, JSON schema", _constrained),
    "graft": Claimed("grafts over the draft alone, text that repeats", _graft),
    "quantised": Claimed("tree in int4 over the tree in bf16", _quantised),
    "no_draft": Claimed("draft made from the target over plain decoding", _no_draft),
    "depth": Claimed("chosen depth rule over a fixed depth", _depth),
    "predictor": Claimed("Brier skill of the depth predictor", _predictor),
    "serving": Claimed("throughput over the best fixed length", _serving, serves=True),
    "batched_trees": Claimed("trees over chains of the same policy", _batched_trees, serves=True),
    "bandits": Claimed("microseconds to choose a length", _bandits, serves=True),
    "wrong_profiles": Claimed(
        "throughput with a wrong profile, of the right one's", _wrong_profiles, serves=True
    ),
    "elastic": Claimed("throughput over static memory", _elastic, serves=True),
    "soak": Claimed("memory after 30 minutes of overload", _soak, serves=True),
}
