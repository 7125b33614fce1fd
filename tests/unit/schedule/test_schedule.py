"""Stages, valid plans, predicted times of plans, and the chosen plan: numbers computed by hand."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx
import pytest
import torch

from yggdrasil.errors import ConfigError
from yggdrasil.report.gantt import plot_plans
from yggdrasil.schedule import choice as choice_module
from yggdrasil.schedule import workload as workload_module
from yggdrasil.schedule.choice import (
    BUDGET_S,
    MAX_TURNS,
    MIN_TURNS,
    PlanChoice,
    PlanSearch,
    Trial,
    choose_plans,
    median_interval,
    try_plan,
)
from yggdrasil.schedule.profile import (
    NUM_STEPS,
    PROBES,
    Sample,
    StageProfile,
    StageTimes,
    fastest,
    profile_of,
)
from yggdrasil.schedule.search import best_plan, plans, simulate
from yggdrasil.schedule.workload import Workload
from yggdrasil.state import DecodeState
from yggdrasil.step.plan import AHEAD, MAIN, SEQUENTIAL, Placement, Plan, needs
from yggdrasil.step.side import SideThread

PLANS = {plan.name: plan for plan in plans()}
TAIL_SIDE = PLANS["tail side"]
TAIL_LATE = PLANS["tail late"]

MAIN_MS = {"draft": 6.0, "prune": 0.5, "verify": 10.0, "choose": 1.0, "accept": 0.5, "commit": 1.0}
HOST_MS = {
    **MAIN_MS,
    "draft after tail": 5.5,
    "draft after next_head": 4.0,
    "choose after noise": 0.25,
    "commit after next_head": 1.25,
    "tail on main": 2.0,
    "tail on side": 3.0,
    "next_head on main": 4.0,
    "next_head on side": 5.0,
    "noise on main": 0.75,
    "noise on side": 1.0,
}
PROFILE = StageProfile(
    HOST_MS, {}, {"tail": 1.0, "noise": 0.5, "next_head": 0.0}, overhead_ms=0.5, handover_ms=0.25
)


def spans(plan: Plan, profile: StageProfile) -> dict[tuple[str, str], tuple[float, float]]:
    return {(span.stage, span.lane): (span.start_ms, span.end_ms) for span in simulate(plan, profile).spans}


def stage_graph(ahead: tuple[str, ...] = AHEAD) -> networkx.DiGraph[str]:
    """A directed graph with an edge from each stage to the stages that read its result."""
    return networkx.DiGraph([(need, stage) for stage in (*MAIN, *ahead) for need in needs(stage, ahead)])


def test_the_graph_is_acyclic_and_has_exactly_the_stages_that_run() -> None:
    for ahead in ((), ("noise",), ("tail",), ("tail", "next_head"), AHEAD):
        graph = stage_graph(ahead)
        assert networkx.is_directed_acyclic_graph(graph)
        assert set(graph) == {*MAIN, *ahead}


def test_the_main_stages_form_a_chain() -> None:
    assert set(stage_graph(()).edges) == set(pairwise(MAIN))


def test_the_next_head_reads_the_chosen_tokens_and_not_the_path() -> None:
    graph = stage_graph()
    assert set(graph.predecessors("next_head")) == {"choose", "tail"}
    assert not networkx.has_path(graph, "accept", "next_head")
    assert not networkx.has_path(graph, "verify", "tail")
    assert not networkx.has_path(graph, "tail", "accept")
    assert set(graph.successors("noise")) == {"choose"}


def test_the_commit_comes_after_all_other_stages() -> None:
    assert networkx.ancestors(stage_graph(), "commit") == {*MAIN, *AHEAD} - {"commit"}


def test_the_order_of_all_stages_is_topological() -> None:
    for plan in plans():
        place = {stage: index for index, stage in enumerate(plan.order)}
        assert all(place[before] < place[after] for before, after in stage_graph(plan.ahead).edges)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (MAIN[:-1], "placements of commit: 0 is not allowed; it must be 1"),
        ((*MAIN, "commit"), "placements of commit: 2 is not allowed"),
        ((*MAIN[:1], "tail", "tail", *MAIN[1:]), "placements of tail: 2 is not allowed; it must be 0 or 1"),
        ((*MAIN[:2], "choose", "verify", *MAIN[4:]), "place of choose: 'before verify' is not allowed"),
        ((*MAIN, "tail"), "place of commit: 'before tail' is not allowed"),
        (("tail", *MAIN), "place of tail: 'before draft' is not allowed"),
        ((*MAIN[:4], "next_head", *MAIN[4:]), "with tail ahead of time"),
        ((*MAIN[:2], ("verify", "side"), *MAIN[3:]), "resource of verify: 'side' is not allowed"),
        (
            (*MAIN[:1], ("tail", "gpu"), *MAIN[1:]),
            "resource of tail: 'gpu' is not allowed; it must be one of",
        ),
        ((*MAIN, "coffee"), "stage: 'coffee' is not allowed; it must be one of"),
    ],
)
def test_an_invalid_plan_is_refused(order: tuple[str | tuple[str, str], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.of("broken", order)


def test_a_plan_survives_json() -> None:
    for plan in plans():
        assert Plan.from_json(json.loads(json.dumps(asdict(plan)))) == plan
    with pytest.raises(ConfigError, match="placements of draft: 0"):
        Plan.from_json({"name": "empty", "placements": []})


def test_the_sequential_plan_is_the_order_of_the_step() -> None:
    assert SEQUENTIAL.placements == tuple(Placement(stage) for stage in MAIN)
    assert plans()[0] == SEQUENTIAL


def test_the_search_has_few_plans_and_all_differ() -> None:
    assert len({plan.placements for plan in plans()}) == len(PLANS) == len(plans())
    assert len(plans()) <= 48
    assert {plan.ahead for plan in plans()} == {
        (),
        ("noise",),
        ("tail",),
        ("noise", "tail"),
        ("tail", "next_head"),
        AHEAD,
    }


def test_the_probes_measure_every_form_of_every_plan() -> None:
    measured = {plan.form(stage) for plan in PROBES for stage in plan.order}
    assert {plan.form(stage) for plan in plans() for stage in plan.order} <= measured
    assert measured == set(HOST_MS)


def test_stages_ahead_of_time_change_the_form_of_later_stages() -> None:
    stages = ("draft", "choose", "commit")
    assert [SEQUENTIAL.form(stage) for stage in stages] == [*stages]
    assert TAIL_SIDE.form("draft") == "draft after tail"
    everything = PLANS["tail late, next_head main, noise late"]
    assert [everything.form(stage) for stage in (*stages, "noise")] == [
        "draft after next_head",
        "choose after noise",
        "commit after next_head",
        "noise on main",
    ]


def test_the_sequential_plan_takes_the_sum_of_its_stages() -> None:
    assert simulate(SEQUENTIAL, PROFILE).makespan_ms == pytest.approx(sum(MAIN_MS.values()) + 0.5)


def test_a_tail_on_main_adds_its_time_and_shortens_the_draft() -> None:
    assert simulate(TAIL_LATE, PROFILE).makespan_ms == pytest.approx(19.0 + 0.5 + 2.0 - 0.5)


def test_a_tail_on_side_overlaps_verification_and_slows_it() -> None:
    timed = spans(TAIL_SIDE, PROFILE)
    assert timed["draft", "main"] == (0.0, 5.5)
    assert timed["tail", "side"] == (5.75, 8.75)  # handed over 0.25 after growth
    assert timed["verify", "main"] == (6.0, 17.0)  # 10 plus 1 of contention
    assert simulate(TAIL_SIDE, PROFILE).makespan_ms == pytest.approx(19.0 + 0.5 - 0.5 + 1.0)


def test_a_stage_waits_for_the_side_and_for_the_handover() -> None:
    slow = replace(PROFILE, host_ms={**HOST_MS, "tail on side": 20.0})
    timed = spans(TAIL_SIDE, slow)
    assert timed["accept", "main"] == (18.0, 18.5)  # needs no draft
    assert timed["commit", "main"] == (26.0, 27.0)  # the tail ends at 25.75


def test_side_stages_run_one_after_another() -> None:
    timed = spans(PLANS["tail side, next_head side, noise side"], PROFILE)
    assert timed["noise", "side"] == (4.25, 5.25)
    assert timed["tail", "side"] == (5.25, 8.25)
    assert timed["verify", "main"] == (4.5, 16.0)
    assert timed["choose", "main"] == (16.0, 16.25)
    assert timed["next_head", "side"] == (16.5, 21.5)
    assert timed["commit", "main"] == (21.75, 23.0)


def test_on_a_device_the_host_launches_ahead_and_waits_only_where_it_syncs() -> None:
    device = dict.fromkeys(HOST_MS, 0.0) | {
        "draft": 6.0,
        "draft after tail": 5.0,
        "draft after next_head": 4.0,
        "verify": 10.0,
        "tail on main": 3.0,
        "tail on side": 3.0,
    }
    device |= {"next_head on main": 5.0, "next_head on side": 5.0}
    host = dict.fromkeys(HOST_MS, 0.1)
    profile = StageProfile(host, device, {}, 0.0, 0.0)
    timed = spans(SEQUENTIAL, profile)
    assert timed["draft", "host"] == pytest.approx((0.0, 0.1))
    assert timed["draft", "main"] == pytest.approx((0.0, 6.0))
    assert timed["verify", "host"] == pytest.approx((6.0, 6.1))  # pruning waited for the tree
    assert timed["verify", "main"] == pytest.approx((6.0, 16.0))
    assert timed["accept", "host"] == pytest.approx((6.2, 6.3))
    assert timed["commit", "host"] == pytest.approx((16.0, 16.1))  # acceptance waited for the tokens
    assert simulate(SEQUENTIAL, profile).makespan_ms == pytest.approx(16.1)
    # a second stream, during pruning and verification
    assert spans(TAIL_SIDE, profile)["tail", "side"] == pytest.approx((5.0, 8.0))
    assert best_plan(profile) == TAIL_SIDE


def test_the_search_picks_overlap_when_it_gains() -> None:
    overlap_gains = replace(
        PROFILE,
        host_ms={**HOST_MS, "draft after tail": 4.5},
        stretch_ms={"tail": 0.25, "noise": 2.0, "next_head": 0.0},
    )
    assert simulate(TAIL_SIDE, overlap_gains).makespan_ms < simulate(SEQUENTIAL, overlap_gains).makespan_ms
    assert best_plan(overlap_gains) == TAIL_SIDE


def test_the_search_picks_sequential_when_overlap_does_not_gain() -> None:
    one_processor = replace(PROFILE, stretch_ms={"tail": 3.0, "noise": 1.0, "next_head": 5.0})
    assert best_plan(one_processor) == SEQUENTIAL


def test_below_one_percent_gain_the_simpler_plan_is_chosen() -> None:
    hardly = replace(
        PROFILE,
        host_ms={**HOST_MS, "draft after tail": 5.9},
        stretch_ms={"tail": 0.0, "noise": 2.0, "next_head": 0.0},
    )
    gain = 1 - simulate(TAIL_SIDE, hardly).makespan_ms / simulate(SEQUENTIAL, hardly).makespan_ms
    assert 0 < gain < 0.01
    assert best_plan(hardly) == SEQUENTIAL


def search(trial: Trial | None, profile: StageProfile | None = PROFILE) -> PlanSearch:
    return PlanSearch(1.0, 20.0, profile, trial)


def trial(gain95: tuple[float, float] | None) -> Trial:
    return Trial(TAIL_SIDE, plan_ms=19.5, step_ms=20.5, num_turns=12 if gain95 else 5, gain95=gain95)


def test_a_choice_survives_json_and_keeps_its_charts() -> None:
    chosen = PlanChoice(greedy=search(None, None), sampled=search(trial((0.01, 0.03))))
    assert PlanChoice.from_json(json.loads(json.dumps(asdict(chosen)))) == chosen
    assert [timeline.plan.name for timeline in chosen.sampled.timelines] == ["sequential", "tail side"]
    assert chosen.greedy.timelines == ()


@pytest.mark.parametrize(
    ("found", "plan", "reason"),
    [
        (search(trial((0.001, 0.03))), TAIL_SIDE, "tail side: 19.500 ms an iteration, 20.500 without it"),
        (search(trial((0.001, 0.03))), TAIL_SIDE, ", gain +0.1% to +3.0% (95 %, 12 turns)"),
        (search(trial((0.0, 0.03))), None, "no plan: tail side: 19.500 ms"),
        (search(trial((-0.02, 0.09))), None, "gain -2.0% to +9.0%"),
        (search(trial(None)), None, "no plan: tail side had 5 turns, and needs 6"),
        (search(None), None, "no plan: none of 19 is predicted to gain 1%"),
        (
            search(None, None),
            None,
            "did not suffice to measure any; an iteration was expected to take 20.00 ms",
        ),
    ],
)
def test_a_plan_runs_only_if_its_whole_interval_is_above_zero(
    found: PlanSearch, plan: Plan | None, reason: str
) -> None:
    assert found.plan == plan
    assert reason in found.why()


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    """P(0 of 6 heads) = 1/64 and P(at most 1 of 9) = 10/512 are below 2.5 %.

    P(0 of 5) = 1/32 and P(at most 1 of 8) = 9/256 are not.
    """
    ascending = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert median_interval([]) is None
    assert median_interval(ascending[:5]) is None
    assert median_interval(ascending[:MIN_TURNS][::-1]) == (0.1, 0.6)
    assert median_interval(ascending[:8]) == (0.1, 0.8)
    assert median_interval(ascending) == (0.2, 0.8)


def test_a_plan_helps_if_a_stage_runs_ahead_of_time() -> None:
    for temperature, without in ((0.0, {"sequential", "noise side", "noise late"}), (0.7, {"sequential"})):
        assert {plan.name for plan in plans() if not plan.helps(temperature)} == without


class Machine:
    """A simulated clock that advances only during iterations, by a given time."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step_ms: Callable[[], float], plan_ms: Callable[[], float]
    ) -> None:
        self.now = 100.0
        self.ran: list[str] = []
        self._ms = {"step": step_ms, "plan": plan_ms}
        for module in (choice_module, workload_module):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Workload, "step_by", lambda work, plan, trace: self.stepper("plan"))

    def stepper(self, name: str) -> Callable[..., None]:
        def step(state: DecodeState, policy: Any) -> None:
            self.ran.append(name)
            self.now += self._ms[name]() / 1e3

        return step

    def work(self, expected_ms: float = 1.0) -> Workload:
        cache = SimpleNamespace(len=2, rollback_=lambda length: None)
        model: Any = SimpleNamespace(device="cpu", max_depth=4, cache=cache)
        policy: Any = None
        text = {"prompt": [1, 2, 3], "policy": policy, "max_context": 64}
        return Workload(target=model, draft=model, step=self.stepper("step"), step_ms=expected_ms, **text)

    def tried(self, seconds: float = 10.0) -> Trial:
        return try_plan(self.work(), TAIL_SIDE, self.now + seconds)


def jittered(ms: float, share: float = 0.1) -> Callable[[], float]:
    rng = random.Random(7 * ms)
    return lambda: ms * (1 + share * rng.random())


def test_a_plan_that_is_faster_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine(monkeypatch, jittered(10.0), jittered(9.0)).tried()
    assert found.gains
    assert found.gain95 is not None
    assert found.gain95[0] < 0.1 < found.gain95[1] + 0.02
    assert found.plan_ms < found.step_ms


def test_a_plan_that_is_as_fast_does_not_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    same = jittered(10.0)
    assert not Machine(monkeypatch, same, same).tried().gains


@pytest.mark.parametrize("change_ms", (0.1, -0.1))
def test_a_machine_that_gets_slower_or_faster_favours_neither_arm(
    monkeypatch: pytest.MonkeyPatch, change_ms: float
) -> None:
    changing = partial(next, (50.0 + change_ms * num for num in count()))
    found = Machine(monkeypatch, changing, changing).tried(seconds=100.0)
    assert found.num_turns == MAX_TURNS
    assert not found.gains


def test_the_arms_take_turns_and_each_is_first_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda: 1.0, lambda: 1.0)
    machine.tried()
    assert len(machine.ran) == 2 * MAX_TURNS * (NUM_STEPS + 1)
    assert machine.ran[:: NUM_STEPS + 1][:6] == ["step", "plan", "plan", "step", "step", "plan"]


@pytest.mark.parametrize("step_ms", (0.2, 5.0, 15.0, 17.0, 300.0, 1000.0))
@pytest.mark.parametrize("slower", (1.0, 3.0))
def test_the_search_keeps_its_time_limit_for_any_iteration_time(
    monkeypatch: pytest.MonkeyPatch, step_ms: float, slower: float
) -> None:
    """Both with a correct profile and on a machine that is now three times slower."""
    machine = Machine(monkeypatch, lambda: slower * step_ms, lambda: slower * step_ms)
    monkeypatch.setattr(choice_module, "best_plan", lambda profile: TAIL_SIDE)
    monkeypatch.setattr(Workload, "prefill", lambda self: None)
    before = machine.now
    chosen = choose_plans(machine.work(step_ms))
    assert machine.now - before <= BUDGET_S["cpu"]
    for found in (chosen.greedy, chosen.sampled):
        assert found.plan is None
        assert (found.trial is not None and found.trial.gain95 is not None) == (slower * step_ms <= 15.0)
    assert chosen.greedy.temperature == 0.0 < chosen.sampled.temperature
    assert step_ms < 17.0 or not machine.ran  # an iteration that cannot end in time does not start


def test_gantt_charts_are_drawn(tmp_path: Path) -> None:
    charts = {timeline.plan.name: timeline for timeline in search(trial(None)).timelines}
    path = plot_plans(charts, tmp_path / "plan.png", title="tiny")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="charts"):
        plot_plans({}, tmp_path / "none.png")


def sample(ms: float, **stages_ms: float) -> Sample:
    """Main stages in sequence, each after 0.25 ms of waiting; the others start at the end of the draft."""
    times = {}
    now = 100.0
    for stage in MAIN:
        times[stage] = StageTimes(now, now + 0.25, now + 0.25 + stages_ms.get(stage, 1.0))
        now = times[stage].end_ms
    drafted = times["draft"].end_ms
    start = drafted + 0.5
    times |= {
        stage: StageTimes(drafted, start, start + stages_ms[stage]) for stage in AHEAD if stage in stages_ms
    }
    return Sample(ms, times, {})


def test_the_fastest_run_of_each_iteration_counts() -> None:
    runs = [[sample(5.0), sample(9.0)], [sample(6.0), sample(8.0)], [sample(50.0), sample(70.0)]]
    assert [kept.ms for kept in fastest(runs)] == [5.0, 8.0]


def test_the_profile_takes_each_form_from_the_first_probe_that_has_it() -> None:
    after_next_head = {"draft": 0.0, "commit": 1.5}
    ahead_on_side = {"noise": 0.5, "tail": 2.5, "next_head": 7.0}
    samples = {
        "sequential": [sample(11.5, verify=3.0, choose=2.0), sample(14.5, verify=5.0, choose=2.0)],
        "tail": [sample(13.0, draft=0.75, verify=99.0, tail=1.5)],
        "all": [sample(13.0, choose=1.25, tail=9.0, noise=0.25, next_head=3.0, **after_next_head)],
        "noise on side": [sample(13.0, verify=4.5, choose=1.25, noise=0.5)],
        "tail on side": [sample(13.0, verify=5.0, draft=0.75, choose=2.0, tail=2.5)],
        "all on side": [
            sample(13.0, verify=6.0, accept=1.25, **ahead_on_side, choose=1.25, **after_next_head)
        ],
    }
    profile = profile_of({name: [each] for name, each in samples.items()})
    assert profile.host_ms["verify"] == pytest.approx(4.0)
    assert (
        profile.host_ms["draft"],
        profile.host_ms["draft after tail"],
        profile.host_ms["draft after next_head"],
    ) == (1.0, 0.75, 0.0)
    assert profile.host_ms["tail on main"] == 1.5
    assert profile.host_ms["tail on side"] == 2.5
    assert profile.host_ms["commit after next_head"] == 1.5
    assert profile.stretch_ms == pytest.approx({"noise": 0.5, "tail": 1.0, "next_head": 2.25 - 1.5})
    assert profile.overhead_ms == pytest.approx(1.5)  # mean of 1.0 and 2.0, without stages and waits
    assert profile.handover_ms == pytest.approx(0.5)
    assert profile.device_ms == {}


def test_time_that_belongs_to_no_stage_of_a_plan_is_overhead() -> None:
    """That of the policy, and of a draft that catches up."""
    without = sample(11.5)
    lagging = replace(without, stages=without.stages | {"catch up": StageTimes(99.0, 99.0, 100.0)})
    assert lagging.between_ms == without.between_ms == pytest.approx(11.5 - 6 * 1.25)


def test_side_jobs_run_in_order_and_wait_raises_their_errors() -> None:
    side = SideThread()
    order = []

    def fail() -> None:
        order.append("fail")
        raise ValueError("from the side")

    side.submit("slow", lambda: (time.sleep(0.02), order.append("slow"))[0])
    side.submit("fail", fail)
    side.submit("last", lambda: order.append("last"))
    side.wait("slow")
    assert order[0] == "slow"
    side.wait("never submitted")
    with pytest.raises(ValueError, match="from the side"):
        side.wait("fail")
    side.join()
    assert order == ["slow", "fail", "last"]
    side.join()


def test_the_side_uses_one_thread_and_leaves_the_thread_count_unchanged() -> None:
    before = torch.get_num_threads()
    seen = []
    try:
        torch.set_num_threads(2)
        side = SideThread()
        side.submit("count", lambda: seen.append(torch.get_num_threads()))
        side.wait("count")
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_unreferenced_side_ends_its_thread() -> None:
    before = set(threading.enumerate())  # threads of other tests may end at this moment
    side = SideThread()
    (worker,) = [thread for thread in threading.enumerate() if thread not in before]
    del side
    worker.join(timeout=5)
    assert not worker.is_alive()
