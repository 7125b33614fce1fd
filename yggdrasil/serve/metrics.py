"""Metrics for Prometheus: base units, names that begin with `ygg_`, and labels with few values.

A *pass* is one row's part of a target forward: it emits the accepted draft tokens and one more. So the mean
of `ygg_emitted_per_pass` is the AAL, and a mean over any window is `rate(..._sum) / rate(..._count)`.
`rate(ygg_emitted_tokens_total)` is the server's tokens per second.

Three counters have their names in vLLM, `vllm:spec_decode_...`, for its dashboards. A *draft* is one row's
tree or chain in a pass, its tokens are the nodes that the target verified, and at most a path of them is
accepted. So the accepted share of a tree is smaller than a chain's, at a larger AAL."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from yggdrasil.serve.request import (
    CohortName,
    CohortStep,
    Observer,
    RequestReport,
    ShadowReport,
    StepReport,
)

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

STEP_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512)
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS_PER_SECOND = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)


class Metrics(Observer):
    """Prometheus metrics of one server, in their own registry.

    Args:
        token_bytes: Bytes of the keys and values of one target token.
        gamma_max: Largest speculative length; bounds the buckets of counts.

    >>> metrics = Metrics(token_bytes=1024, gamma_max=3)
    >>> metrics.on_refusal(429)
    >>> metrics.registry.get_sample_value("ygg_requests_refused_total", {"status": "429"})
    1.0
    """

    def __init__(self, *, token_bytes: int, gamma_max: int) -> None:
        self.registry = CollectorRegistry()
        self._token_bytes = token_bytes
        self._is_speculating: bool | None = None
        # (batch size, gamma) -> tokens, seconds
        self._goodput: dict[tuple[int, int], tuple[int, float]] = {}
        self._define_requests()
        self._define_steps(gamma_max)
        self._define_acceptance(gamma_max)
        self._define_cohorts()
        self._define_shadows()
        self._define_state()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def on_refusal(self, status: int) -> None:
        """Count a request that was answered with an HTTP error."""
        self._refused.labels(status).inc()

    def on_shadow(self, report: ShadowReport) -> None:
        self._shadows.inc()
        self._shadow_differences.inc(report.differs)
        self._shadow_seconds.labels("plain").inc(report.plain_ms / 1e3)
        self._shadow_seconds.labels("speculative").inc(report.speculative_ms / 1e3)

    def on_finish(self, report: RequestReport) -> None:
        if report.is_shadow:
            return
        self._requests.labels(report.finish).inc()
        self._prompt_tokens.inc(report.prompt_tokens)
        self._shared_tokens.inc(report.shared_tokens)
        self._preemptions.inc(report.preemptions)
        self._total.observe(report.total_ms / 1e3)
        self._queue.observe(report.queue_ms / 1e3)
        if report.emitted_tokens:
            self._ttft.observe(report.ttft_ms / 1e3)
            self._request_emitted_per_pass.observe(report.emitted_tokens / max(1, report.target_passes))
        if report.emitted_tokens > 1:
            self._tpot.observe(report.tpot_ms / 1e3)
            self._rate.observe(1e3 / max(report.tpot_ms, 1e-6))

    def on_step(self, report: StepReport) -> None:
        self._passes.inc()
        self._prefilled.inc(report.prompt_tokens)
        self._observe_time(report)
        self._set_state(report)
        self._observe_cohorts(report.cohorts)
        if report.batch_size:
            accepted = [max(0, emitted - 1) for emitted in report.emitted]
            self._observe_rows(report, accepted)
            self._observe_depths(report, accepted)
            self._observe_speculation(report)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _define_requests(self) -> None:
        self._requests = self._counter(
            "ygg_requests", "Finished requests by finish reason", labels=["finish"]
        )
        self._refused = self._counter(
            "ygg_requests_refused", "Requests answered with an HTTP error, by status", labels=["status"]
        )
        self._prompt_tokens = self._counter("ygg_prompt_tokens", "Prompt tokens of finished requests")
        self._shared_tokens = self._counter(
            "ygg_shared_prompt_tokens", "Prompt tokens whose KV another request had computed"
        )
        self._preemptions = self._counter(
            "ygg_preemptions", "How often a request lost its KV pages and was computed again"
        )
        self._ttft = self._histogram(
            "ygg_ttft_seconds", "From arrival to the first token", buckets=REQUEST_SECONDS
        )
        self._tpot = self._histogram(
            "ygg_tpot_seconds", "Per token after the first step, by request", buckets=TOKEN_SECONDS
        )
        self._total = self._histogram(
            "ygg_request_seconds", "From arrival to the end", buckets=REQUEST_SECONDS
        )
        self._queue = self._histogram(
            "ygg_queue_seconds", "From arrival to admission", buckets=REQUEST_SECONDS
        )
        self._rate = self._histogram(
            "ygg_request_tokens_per_second",
            "Tokens per second after the first step, by request",
            buckets=TOKENS_PER_SECOND,
        )

    def _define_steps(self, gamma_max: int) -> None:
        self._passes = self._counter("ygg_target_passes", "Target forwards, prompts included")
        self._prefilled = self._counter(
            "ygg_prefilled_tokens",
            "Prompt tokens that ran in the target, those computed again after preemption included",
        )
        self._emitted = self._counter("ygg_emitted_tokens", "Tokens that clients got")
        self._stages = self._counter(
            "ygg_stage_seconds",
            "Wall clock of steps by stage; host is the time that is neither drafting nor verifying",
            labels=["stage"],
        )
        self._step = self._histogram(
            "ygg_step_seconds",
            "Wall clock of steps that emitted something",
            labels=["batch_size"],
            buckets=STEP_SECONDS,
        )
        counts = [*range(1, gamma_max + 2)]
        self._emitted_per_pass = self._histogram(
            "ygg_emitted_per_pass", "Tokens that a pass of the target emitted for a row", buckets=counts
        )
        self._request_emitted_per_pass = self._histogram(
            "ygg_request_emitted_per_pass", "Mean tokens per pass of a request", buckets=counts
        )
        self._steps = self._counter(
            "ygg_steps", "Steps that emitted something, by selected speculative length", labels=["gamma"]
        )
        self._plain_steps = self._counter(
            "ygg_steps_without_speculation", "Steps that emitted something and had no draft token"
        )
        self._switches = self._counter(
            "ygg_speculation_switches", "How often speculation was switched on or off", labels=["to"]
        )
        self._mean_goodput = self._gauge(
            "ygg_goodput_tokens_per_second",
            "Mean realised goodput of steps without prompt tokens since the start",
            labels=["batch_size", "gamma"],
        )

    def _define_acceptance(self, gamma_max: int) -> None:
        self._accepted = self._histogram(
            "ygg_accepted_tokens",
            "Accepted draft tokens of a row that drafted, by batch size",
            labels=["batch_size"],
            buckets=[*range(gamma_max + 1)],
        )
        self._drafted_at = self._counter(
            "ygg_drafted_at_depth", "Draft tokens verified, by their depth in the tree", labels=["depth"]
        )
        self._accepted_at = self._counter(
            "ygg_accepted_at_depth", "Draft tokens accepted, by their depth in the tree", labels=["depth"]
        )
        self._rejected_at = self._counter(
            "ygg_rejected_at_depth",
            "Rows whose draft tokens of a depth were all rejected after an accepted path, by that depth",
            labels=["depth"],
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Trees or chains that were verified")
        self._draft_tokens = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified"
        )
        self._accepted_drafts = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted"
        )
        self._rollback = self._counter("ygg_rollback_tokens", "Draft tokens verified and not accepted")
        self._rejected_bytes = self._counter(
            "ygg_rejected_kv_bytes", "Target KV written for draft tokens not accepted"
        )

    def _define_cohorts(self) -> None:
        labels = CohortName._fields
        self._cohort_drafted = self._counter(
            "ygg_cohort_draft_tokens", "Draft tokens, verified or not, by kind of request", labels
        )
        self._cohort_accepted = self._counter(
            "ygg_cohort_accepted_tokens", "Accepted draft tokens by kind of request", labels
        )
        self._cohort_gained = self._gauge(
            "ygg_cohort_gained_seconds",
            "Time gained over plain decoding since the start, as the policy estimates a plain step",
            labels,
        )
        self._cohort_speculates = self._gauge(
            "ygg_cohort_speculates", "1 while requests of this kind may speculate", labels
        )

    def _define_shadows(self) -> None:
        self._shadows = self._counter("ygg_shadow_requests", "Requests that were decoded both ways")
        self._shadow_differences = self._counter(
            "ygg_shadow_differences", "Requests whose two decodings differ; must stay 0"
        )
        self._shadow_seconds = self._counter(
            "ygg_shadow_seconds",
            "Time after the first token of requests that were decoded both ways",
            labels=["decoding"],
        )

    def _define_state(self) -> None:
        self._gamma = self._gauge("ygg_gamma", "Speculative length of the last step")
        self._lag = self._gauge(
            "ygg_draft_lag_tokens", "Tokens by which the draft's KV lags in the worst row"
        )
        self._running = self._gauge("ygg_running_requests", "Rows of the batch")
        self._waiting = self._gauge("ygg_waiting_requests", "Queued requests")
        self._pages = self._gauge("ygg_kv_pages", "KV pages by state", labels=["state"])
        self._draft_in = self._gauge(
            "ygg_draft_in_memory",
            "1 while the draft's weights are in memory, 0 while KV pages use their memory",
        )

    def _observe_time(self, report: StepReport) -> None:
        host_ms = max(0.0, report.total_ms - report.draft_ms - report.verify_ms)
        stages_ms = {"draft": report.draft_ms, "verify": report.verify_ms, "host": host_ms}
        for stage, spent_ms in stages_ms.items():
            self._stages.labels(stage).inc(spent_ms / 1e3)

    def _set_state(self, report: StepReport) -> None:
        self._gamma.set(report.gamma)
        self._lag.set(report.max_lag)
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._pages.labels("free").set(report.free_pages)
        self._pages.labels("used").set(report.num_pages - report.free_pages)
        self._draft_in.set(report.is_draft_in)

    def _observe_cohorts(self, cohorts: Sequence[CohortStep]) -> None:
        for cohort in cohorts:
            self._cohort_drafted.labels(*cohort.name).inc(cohort.drafted)
            self._cohort_accepted.labels(*cohort.name).inc(cohort.accepted)
            self._cohort_gained.labels(*cohort.name).inc(cohort.gained_ms / 1e3)
            self._cohort_speculates.labels(*cohort.name).set(cohort.speculates)

    def _observe_rows(self, report: StepReport, accepted: Sequence[int]) -> None:
        batch_size = report.batch_size
        self._emitted.inc(report.returned_tokens)
        self._step.labels(batch_size).observe(report.total_ms / 1e3)
        accepted_tokens = self._accepted.labels(batch_size)
        rows = zip(report.drafted, report.emitted, accepted, strict=True)
        for row_drafted, row_emitted, row_accepted in rows:
            if row_emitted:
                self._emitted_per_pass.observe(row_emitted)
            if row_drafted:
                accepted_tokens.observe(row_accepted)
        self._drafts.inc(sum(map(bool, report.drafted)))
        self._draft_tokens.inc(sum(report.drafted))
        self._accepted_drafts.inc(sum(accepted))
        rolled_back = sum(report.drafted) - sum(accepted)
        self._rollback.inc(max(0, rolled_back))
        self._rejected_bytes.inc(max(0, rolled_back) * self._token_bytes)

    def _observe_depths(self, report: StepReport, accepted: Sequence[int]) -> None:
        """Sum over the rows first, because every update of a counter takes a lock."""
        depths = report.depths
        if depths is None:
            depths = [range(1, count + 1) for count in report.drafted]
        reached = Tally(depth for of_row in depths for depth in of_row)
        kept = Tally(depth for count in accepted for depth in range(1, count + 1))
        rejected = Tally(
            count + 1 for of_row, count in zip(depths, accepted, strict=True) if count + 1 in of_row
        )
        tallies = ((self._drafted_at, reached), (self._accepted_at, kept), (self._rejected_at, rejected))
        for counter, tally in tallies:
            for depth, count in tally.items():
                counter.labels(depth).inc(count)

    def _observe_speculation(self, report: StepReport) -> None:
        self._steps.labels(report.gamma).inc()
        is_speculating = any(report.drafted)
        self._plain_steps.inc(not is_speculating)
        if self._is_speculating not in (None, is_speculating):
            self._switches.labels("on" if is_speculating else "off").inc()
        self._is_speculating = is_speculating
        if not report.prompt_tokens:
            arm = report.batch_size, report.gamma
            tokens, seconds = self._goodput.get(arm, (0, 0.0))
            tokens += sum(report.emitted)
            seconds += report.total_ms / 1e3
            self._goodput[arm] = tokens, seconds
            self._mean_goodput.labels(*arm).set(tokens / max(seconds, 1e-9))
