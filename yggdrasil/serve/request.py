"""Requests to the batch, and the events and reports that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from yggdrasil.config import GenerateConfig
from yggdrasil.state import StepResult

__all__ = [
    "DEFECT",
    "CohortName",
    "CohortStep",
    "Event",
    "FinishReason",
    "Observer",
    "Request",
    "RequestReport",
    "ShadowReport",
    "StepReport",
    "StepTree",
    "TokenLogProb",
]

# The message of an unexpected exception may contain paths and a stack, so clients get this one.
DEFECT = "internal error; the server's log has more"
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogProb:
    """A token and its log-probability from the target, the same with and without speculation.

    Args:
        log_prob: Natural logarithm of its probability before temperature and filters.
        top: The likeliest tokens at its place, (id, log-probability), likeliest first; `num_top` of them.
        rank: 1 for the likeliest token, 2 for the next one, ...
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 1


@dataclass(frozen=True)
class RequestReport:
    """Counts and times of one finished request.

    Args:
        shared_tokens: Prompt tokens whose KV another request had computed.
        target_passes: Steps that emitted something for it.
        preemptions: How often it lost its pages and was computed again.
        queue_ms: From arrival to the first admission.
        ttft_ms: From arrival to the first token; 0 if there was none.
        total_ms: From arrival to the end.
        is_shadow: Whether it is the second decoding of a request; see shadow.py.
    """

    finish: FinishReason
    prompt_tokens: int
    emitted_tokens: int
    shared_tokens: int
    target_passes: int
    preemptions: int
    queue_ms: float
    ttft_ms: float
    total_ms: float
    is_shadow: bool = False

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first step; 0 for a single token."""
        if self.emitted_tokens <= 1:
            return 0.0
        return (self.total_ms - self.ttft_ms) / (self.emitted_tokens - 1)


@dataclass(frozen=True)
class StepTree:
    """The tree of one step of a request, by node; node 0 is the root, the last token before the step.

    Args:
        shape: Shape of the drafted tree.
        drafted: Its number of nodes. The lists have those that the target verified.
        parents: Nodes, -1 for the root.
        log_probs: The draft's, of the paths from the root.
        path: Accepted nodes, root first.
        ms: Milliseconds of the step, which all rows share.
    """

    shape: str
    drafted: int
    tokens: Sequence[int]
    parents: Sequence[int]
    log_probs: Sequence[float]
    path: Sequence[int]
    ms: float

    @classmethod
    def of(cls, result: StepResult) -> StepTree:
        """The verified tree of a step."""
        tree = result.tree
        return cls(
            shape=str(result.shape),
            drafted=result.drafted,
            tokens=tree.token_N.tolist(),
            parents=tree.parent_N.tolist(),
            log_probs=tree.log_prob_N.tolist(),
            path=result.path,
            ms=result.ms,
        )


@dataclass(frozen=True)
class Event:
    """The result of one step for a request, or its end.

    Args:
        text: Released text; empty while a character or a stop text is incomplete.
        log_probs: Log-probabilities of these tokens, if requested.
        finish: Reason why this is the last event; None if it is not.
        error: Error message if `finish` is "error".
        report: Counts and times of the whole request, in its last event.
        prompt_log_probs: Log-probabilities of the prompt's tokens from the second one on, in the first
            event, if requested.
        tree: What the step drafted, if requested.
    """

    text: str
    tokens: Sequence[int]
    log_probs: Sequence[TokenLogProb] = ()
    finish: FinishReason | None = None
    error: str = ""
    report: RequestReport | None = None
    prompt_log_probs: Sequence[TokenLogProb] = ()
    tree: StepTree | None = None


class CohortName(NamedTuple):
    """What the requests of a cohort have in common; see cohorts.py.

    Args:
        workload: The label of the request, empty without one.
        sampling: "greedy" or "sampled".
        processors: "yes" or "no".
    """

    workload: str
    sampling: str
    processors: str


class CohortStep(NamedTuple):
    """What a step did for one cohort.

    Args:
        drafted: Draft tokens, verified or not.
        gained_ms: Estimated milliseconds over plain decoding, below 0 if speculation lost.
        speculates: Whether its rows may draft in the next step.
    """

    name: CohortName
    drafted: int
    accepted: int
    gained_ms: float
    speculates: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One completion.

    Args:
        prompt: At least one token.
        config: Limits, stop texts and sampling; `plain` is the same as `speculation=0`.
        speculation: Largest number of draft tokens in a step; None leaves it to the policy, 0 decodes this
            row without speculation.
        num_top: Number of likeliest tokens to report in addition to every emitted token; None reports no
            log-probabilities.
        prompt_top: The same for the tokens of the prompt.
        workload: Label of the client's kind of work, for its cohort; empty without one.
        trees: Whether events have the tree of their step.
        is_shadow: Whether it is the second decoding of a request, for no client.
        on_event: Called after every step that emitted something and at the end, in the batcher's thread;
            must return at once.
    """

    prompt: Sequence[int]
    config: GenerateConfig = field(default_factory=GenerateConfig)
    speculation: int | None = None
    num_top: int | None = None
    prompt_top: int | None = None
    workload: str = ""
    trees: bool = False
    is_shadow: bool = False
    on_event: Callable[[Event], None] = lambda event: None


@dataclass(frozen=True)
class StepReport:
    """Counts and times of one step of the batch.

    Args:
        gamma: Speculative length that the policy selected.
        prompt_tokens: Prompt tokens that ran in the target's forward, without roots, and without prompts
            whose log-probabilities were requested, which have forwards of their own.
        drafted: Draft tokens verified, for each row that emitted.
        emitted: Tokens of the target for each of these rows: accepted + 1. Tokens after the end of a text,
            which no client gets, are included.
        returned_tokens: Tokens that clients got, of all rows.
        max_lag: L_max: tokens by which the draft's KV lagged in the worst row when the step began.
        catch_up_ms: Time to bring the draft's KV up to the text.
        draft_ms: Time of drafting, `catch_up_ms` included.
        verify_ms: Time of the target's forward.
        total_ms: Time of the step; the part that is neither drafting nor verifying is the host's.
        running: Rows after the step.
        waiting: Queued requests after the step.
        free_pages: KV pages in the free queue after the step.
        num_pages: Total KV pages, those in the draft's memory included while they are lent.
        is_draft_in: Whether the draft's weights are in memory.
        depths: Depth of every verified draft token in its row's tree, for each row of `drafted`; None for
            chains.
        cohorts: What the step did for each cohort of the rows that decoded.
    """

    gamma: int
    prompt_tokens: int
    drafted: tuple[int, ...]
    emitted: tuple[int, ...]
    returned_tokens: int
    max_lag: int
    catch_up_ms: float
    draft_ms: float
    verify_ms: float
    total_ms: float
    running: int
    waiting: int
    free_pages: int
    num_pages: int
    is_draft_in: bool = True
    depths: Sequence[Sequence[int]] | None = None
    cohorts: Sequence[CohortStep] = ()

    @property
    def batch_size(self) -> int:
        """B: rows that emitted something."""
        return len(self.emitted)

    @property
    def goodput(self) -> float:
        """Emitted tokens per second."""
        return sum(self.emitted) / self.total_ms * 1e3


@dataclass(frozen=True)
class ShadowReport:
    """Both decodings of one request.

    Args:
        differs: Whether the tokens or the reasons of the end differ.
        plain_ms: Milliseconds after the first token without speculation.
        speculative_ms: The same with speculation.
    """

    differs: bool
    plain_ms: float
    speculative_ms: float


class Observer:
    """Receives reports of steps and finished requests in the batcher's thread; this one ignores them."""

    def on_step(self, report: StepReport) -> None:
        """Called after every step."""

    def on_finish(self, report: RequestReport) -> None:
        """Called after every request."""

    def on_shadow(self, report: ShadowReport) -> None:
        """Called after every request that was decoded twice."""
