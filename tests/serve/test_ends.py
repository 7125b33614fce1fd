"""The end of a text does not depend on how its tokens are split into steps, in a batch or alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_pair
import torch
from batches import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.config import GenerateConfig
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.report.run import Run
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.pages import PagePool
from yggdrasil.serve.ticket import Ticket
from yggdrasil.state import Shape, StepResult, truncate
from yggdrasil.text.tokenizer import TextStream, Tokenizer
from yggdrasil.trace import Trace
from yggdrasil.tree import TokenTree

END = 0
STOPS = ("\nUser:", "User")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_pair.save_tokenizer(folder)
    return Tokenizer(folder / "tokenizer.json", "ygg compile")


class Scripted:
    """A batcher and an engine without models: the target's tokens are given step by step."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], config: GenerateConfig) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.config = config

    def batched(self, steps: Sequence[list[int]]) -> tuple[Client, Ticket, list[tuple[int, int]]]:
        """Run the steps in a batch.

        Returns:
            The client, its ticket, and for every step the numbers of emitted and returned tokens.
        """
        no_model: Any = SimpleNamespace(
            device="", sizes=(1,), vocab=512, meta=torch.zeros, graph_object=lambda meta_NM: None
        )
        pool = PagePool(16, num_rows=1, max_indices=256)
        batcher = Batcher(
            no_model,
            no_model,
            pool,
            FixedGamma(0),
            tokenizer=self.tokenizer,
            max_context=256,
            gamma_max=8,
            eos_tokens=(END,),
        )
        client = Client(self.prompt, self.config, num_top=0)
        counts = []
        ticket = batcher.ticket(client.request())
        batcher.submit(ticket)
        batcher.scheduler.admit_()
        for tokens in steps:
            if ticket.is_finished:
                break
            pool.extend_(0, len(ticket.state.tokens) + len(tokens))
            size = len(tokens)
            batcher.stepper._verified.logits_NV = torch.zeros(size, tiny_pair.VOCAB)
            batcher.stepper._verified.roots = [0]
            tree = TokenTree.root(END, capacity=1)
            result = StepResult(
                tokens, Shape(1, size - 1), size, size, 0, 1.0, lambda tree=tree: tree, list(range(size))
            )
            ticket.state.tokens.extend(tokens)
            ticket.running.target_len = ticket.state.root_pos
            counts.append((size, batcher._publish_results_([ticket], [result])))
        batcher.scheduler.check()
        return client, ticket, counts

    def alone(self, steps: Sequence[list[int]]) -> Run:
        """Run the steps as a single request."""
        model = SimpleNamespace(graph_ms=0.0)
        engine = SimpleNamespace(
            trace=Trace(),
            draft=model,
            target=model,
            eos_tokens=frozenset({END}),
            kept_len=0,
            generate=lambda *_, keep: self._results(steps),
        )
        latency = SimpleNamespace(plain_ms=lambda *_: 1.0, step_ms=lambda *_: 1.0)
        pair: Any = SimpleNamespace(engine=engine, tokenizer=self.tokenizer, latency=latency)
        return Run(pair, self.prompt, self.config, policy=object()).complete()

    def _results(self, steps: Sequence[list[int]]) -> Any:
        """The steps, cut as the engine cuts them."""
        num_left = self.config.max_new_tokens
        ends = () if self.config.ignore_eos else (END,)
        tree = TokenTree.root(END, capacity=1)
        assert num_left is not None
        stream = TextStream(self.tokenizer, self.config.stop, self.prompt)
        for emitted in steps:
            tokens = stream.take(truncate(emitted, room=num_left, eos_tokens=ends))
            num_left -= len(tokens)
            size = len(emitted)
            shape = Shape(1, size - 1)
            yield StepResult(tokens, shape, size, size, 0, 1.0, lambda: tree, list(range(size)))
            if num_left == 0 or tokens[-1] in ends or stream.stopped:
                return


def split(tokens: list[int], sizes: Sequence[int]) -> list[list[int]]:
    """Split tokens into steps of these sizes, then into steps of one token."""
    steps = []
    start = 0
    for size in (*sizes, *[1] * len(tokens)):
        steps.append(tokens[start : start + size])
        start += size
    return [step for step in steps if step]


def test_the_stop_text_that_is_complete_first_ends_the_text(tokenizer: Tokenizer) -> None:
    tokens = [token for text in ("Sure", "\n", "User", ":") for token in tokenizer.encode(text)]
    scripted = Scripted(tokenizer, tokenizer.encode("Q"), GenerateConfig(max_new_tokens=100, stop=STOPS))
    for steps in (split(tokens, ()), [tokens]):
        client, ticket, _ = scripted.batched(steps)
        run = scripted.alone(steps)
        assert (client.text, client.tokens, client.finish) == ("Sure\n", tokens[:-1], "stop")
        assert (run.text, run.tokens, run.finish_reason) == ("Sure\n", tokens[:-1], "stop")
        assert [entry.token for event in client.events for entry in event.log_probs] == tokens[:-1]
        assert ticket.emitted_tokens == run.num_tokens


WORDS = ("Sure", "\n", "User", ":", " fox", "a", "é", "日", "U", "s", "er")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_split_into_steps_gives_the_same_text_tokens_and_reason(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    words = data.draw(st.lists(st.one_of(st.sampled_from(WORDS), st.none()), min_size=1, max_size=30))
    tokens = [token for word in words for token in ([END] if word is None else tokenizer.encode(word))]
    stop = tuple(
        data.draw(st.sets(st.sampled_from(("\nUser:", "User", "er", "日a", ": ", "xyz")), max_size=3))
    )
    # not more tokens than are given, so that every text ends
    config = GenerateConfig(
        max_new_tokens=data.draw(st.integers(1, len(tokens))),
        stop=stop,
        ignore_eos=data.draw(st.booleans()),
    )
    scripted = Scripted(tokenizer, tokenizer.encode("Once upon"), config)
    expected = scripted.alone(split(tokens, ()))
    steps = split(tokens, data.draw(st.lists(st.integers(1, 9), max_size=20)))
    run = scripted.alone(steps)
    client, ticket, _ = scripted.batched(steps)
    end = (expected.text, expected.tokens, expected.finish_reason)
    assert (run.text, run.tokens, run.finish_reason) == end
    assert (client.text, client.tokens, client.finish) == end
    assert list(ticket.state.emitted) == client.tokens  # the history is what the client got


def test_tokens_after_the_end_of_a_text_do_not_count_as_rejected(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    b = tokenizer.encode("b")[0]
    for emitted, stop in (([a, END, a, b], ()), ([a, b, a, b], ("ab",))):
        scripted = Scripted(tokenizer, tokenizer.encode("Q"), GenerateConfig(max_new_tokens=50, stop=stop))
        client, _, counts = scripted.batched([emitted])
        [result] = scripted.alone([emitted]).results
        assert client.tokens == result.tokens == emitted[:2]
        assert counts == [(4, 2)]
        assert result.accepted == 3


@pytest.mark.parametrize("is_llama", (False, True), ids=("metaspace", "llama"))
def test_the_text_after_a_prompt_begins_with_the_blank_between_them(tmp_path: Path, is_llama: bool) -> None:
    sentence_piece = Tokenizer(
        tiny_pair.save_sentence_piece_tokenizer(tmp_path, is_llama=is_llama), "ygg compile"
    )
    tokens = sentence_piece.encode("Once upon a time there was a fox")
    scripted = Scripted(sentence_piece, tokens[:3], GenerateConfig(max_new_tokens=len(tokens) - 3))
    continuation = sentence_piece.decode(tokens)[len(sentence_piece.decode(tokens[:3])) :]
    assert continuation.startswith(" ")
    assert scripted.alone([tokens[3:]]).text == scripted.batched([tokens[3:]])[0].text == continuation
