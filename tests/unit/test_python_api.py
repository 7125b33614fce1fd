"""The Python interface: texts, streams, batches and conversations of a pair, and its errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_pair

import yggdrasil
from yggdrasil import api
from yggdrasil.api import Pair, load_pair
from yggdrasil.bundle import Bundle
from yggdrasil.config import AUTO, CompileConfig, GenerateConfig, SamplingConfig
from yggdrasil.errors import ArtifactError, ConfigError, UsageError, YggError
from yggdrasil.offline import pipeline
from yggdrasil.policy.shape import FixedShape
from yggdrasil.policy.uncalibrated import NO_LATENCY, UNCALIBRATED
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.state import Row, Shape
from yggdrasil.step.choice import Choice
from yggdrasil.text.tokenizer import TextStream
from yggdrasil.tree import TokenTree

PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "One day Zoë saw a", "The owl said:", "Tom liked to"]
MESSAGES = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def pair(tiny_bundle: Bundle) -> Pair:
    """The tiny pair, as a program loads it."""
    return load_pair(tiny_bundle.name)


def test_a_result_has_text_tokens_and_figures(pair: Pair) -> None:
    result = pair.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert result.text == pair.tokenizer.decode(result.tokens) == str(result)
    assert (len(result.tokens), result.finish_reason) == (24, "length")
    assert result.aal == 24 / result.target_passes > 1
    assert result.tok_per_s > 0
    assert result.prompt_tokens == len(pair.tokenizer.encode(PROMPT))


def test_a_list_is_a_batch_with_the_texts_of_one_by_one(pair: Pair) -> None:
    for options in ({}, {"temperature": 0.9, "seed": 5}, {"stop": "the"}, {"plain": True}):
        together = pair.generate(PROMPTS, max_new_tokens=20, **options)
        alone = [pair.generate(prompt, max_new_tokens=20, **options) for prompt in PROMPTS]
        for one, other in zip(together, alone, strict=True):
            assert (one.text, one.tokens, one.finish_reason) == (
                other.text,
                other.tokens,
                other.finish_reason,
            )
    assert pair.generate([]) == []


def test_more_prompts_than_rows_are_all_continued(pair: Pair) -> None:
    results = pair.generate([PROMPT] * 40, max_new_tokens=3)
    assert {result.text for result in results} == {pair.generate(PROMPT, max_new_tokens=3).text}


def test_a_prompt_may_be_token_ids(pair: Pair) -> None:
    tokens = pair.tokenizer.encode(PROMPT)
    expected = pair.generate(PROMPT, max_new_tokens=8)
    assert pair.generate(tokens, max_new_tokens=8).text == expected.text
    [result] = pair.generate([tokens], max_new_tokens=8)
    assert result.text == expected.text


def test_a_stream_is_the_text_in_whole_characters(pair: Pair) -> None:
    run = pair.stream("One day Zo", max_new_tokens=40, temperature=1.5, seed=2, ignore_eos=True)
    chunks = list(run)
    assert "".join(chunks) == run.text == run.result.text
    assert len(chunks) > 1
    assert "\ufffd" not in "".join(chunks[:-1])


def test_a_stream_that_was_left_goes_on_where_it_was(pair: Pair) -> None:
    expected = pair.generate(PROMPT, max_new_tokens=20).text
    run = pair.stream(PROMPT, max_new_tokens=20)
    first = next(iter(run))
    assert run.text == first
    assert first + "".join(run) == expected


def test_a_stream_can_be_awaited_while_other_tasks_run(pair: Pair) -> None:
    async def read() -> tuple[list[str], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        chunks = [chunk async for chunk in pair.stream(PROMPT, max_new_tokens=20)]
        other.cancel()
        return chunks, ticks

    chunks, ticks = asyncio.run(read())
    assert "".join(chunks) == pair.generate(PROMPT, max_new_tokens=20).text
    assert ticks > len(chunks)


def test_of_two_streams_at_once_one_is_whole_and_the_other_is_refused(pair: Pair) -> None:
    options: Any = {"max_new_tokens": 100, "ignore_eos": True, "plain": True}
    expected = pair.generate(PROMPT, **options).text

    async def read() -> str:
        return "".join([chunk async for chunk in pair.stream(PROMPT, **options)])

    async def both() -> list[str | BaseException]:
        return await asyncio.gather(read(), read(), return_exceptions=True)

    whole, refused = sorted(asyncio.run(both()), key=lambda result: isinstance(result, YggError))
    assert whole == expected
    assert str(refused).startswith("another generation has begun on this engine")


def test_no_two_threads_are_in_one_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    step = pair.engine.step
    meeting = threading.Barrier(2)
    met: list[int] = []

    def meet(*arguments: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(0.3))  # seconds for the other thread to come, which it must not
        return step(*arguments)

    monkeypatch.setattr(pair.engine, "step", meet)
    with ThreadPoolExecutor(2) as threads:
        runs = [pair.stream(PROMPT), pair.stream(PROMPT)]
        first, second = threads.map(lambda run: next(iter(run)), runs)
    assert first == second
    assert met == []


def test_steps_that_two_threads_call_run_one_after_the_other(pair: Pair) -> None:
    class Meeting(FixedShape):
        """Its first choice waits for that of another thread, which must not come."""

        def choose(self, rows: Sequence[Row]) -> Choice:
            with suppress(threading.BrokenBarrierError):
                met.append(meeting.wait(0.3))  # seconds
            return super().choose(rows)

    meeting = threading.Barrier(2)
    met: list[int] = []
    engine = pair.engine
    state = pair.tree(PROMPT, SamplingConfig()).row.state  # its prompt is in the target's KV
    policy = Meeting(Shape(4, 2, 8), UNCALIBRATED, NO_LATENCY, (8,))
    with ThreadPoolExecutor(2) as threads:
        steps = list(threads.map(lambda _: engine.step(state, policy), range(2)))
    assert met == []
    tokens = [token for step in steps for token in step.tokens]
    assert sorted(tokens) == sorted(state.emitted)
    assert list(pair.generate(PROMPT, ignore_eos=True).tokens)[: len(tokens)] == state.emitted


def test_batches_of_two_threads_have_the_texts_of_one(pair: Pair) -> None:
    expected = [result.text for result in pair.generate(PROMPTS, max_new_tokens=20)]
    with ThreadPoolExecutor(2) as threads:
        batches = threads.map(lambda _: pair.generate(PROMPTS, max_new_tokens=20), range(4))
        assert [[result.text for result in batch] for batch in batches] == [expected] * 4


def test_options_are_those_of_a_request(pair: Pair) -> None:
    plain = pair.generate(PROMPT, max_new_tokens=16, plain=True)
    assert plain.aal == 1
    assert plain.text == pair.generate(PROMPT, max_new_tokens=16).text
    inspected = pair.stream(PROMPT, max_new_tokens=16, inspect=True).complete()
    assert all(result.inspection is not None for result in inspected.results if result.shape.depth)
    assert inspected.text == plain.text
    chain = pair.stream(PROMPT, max_new_tokens=16, shape=Shape(width=1, depth=2)).complete()
    assert {result.shape.width for result in chain.results} == {1}
    assert pair.generate(PROMPT, max_new_tokens=40, stop=["named"]).text.count("named") == 0
    assert pair.config(ban="fox") == pair.config(ban=["fox"])
    config = pair.config(ban=["fox"], logit_bias={3: -1.0}, model_defaults=False, top_k=2)
    assert config.sampling.processors is not None
    assert config.sampling.processors.logit_bias == ((3, -1.0),)


def test_a_grammar_shapes_the_text(pair: Pair) -> None:
    pytest.importorskip("llguidance")
    assert pair.generate(PROMPT, choice=["cat", "dog"]).text in ("cat", "dog")
    assert pair.generate(PROMPT, regex="[0-9]{3}").text.isdigit()


def test_a_conversation_is_rendered_by_the_template(pair: Pair) -> None:
    expected = pair.generate("user: Who are you?\nassistant:", max_new_tokens=12, stop="\nuser:")
    assert pair.chat(MESSAGES, max_new_tokens=12).text == expected.text
    assert pair.chat("Who are you?", max_new_tokens=12).text == expected.text
    assert "".join(pair.stream(MESSAGES, max_new_tokens=12)) == expected.text


def test_a_template_of_the_model_decides_itself_where_its_answer_ends(tiny_bundle: Bundle) -> None:
    own = load_pair(tiny_bundle.name)
    own.__dict__["template"] = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert own.chat_tokens(MESSAGES) == own.tokenizer.encode("<Who are you?>", special_tokens=False)
    assert own.stream(MESSAGES, stop="x").config.stop == ("x",)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda pair: pair.generate(PROMPT, temprature=1), "option: 'temprature' is not allowed"),
        (lambda pair: pair.generate(PROMPT, temprature=1), "did you mean temperature?"),
        (lambda pair: pair.generate(PROMPT, temperature="hot"), "temperature: 'hot'"),
        (lambda pair: pair.generate(PROMPT, temperature=-1), "temperature: -1"),
        (lambda pair: pair.generate(PROMPT, top_k=1.5), "top_k: 1.5 is not allowed; it must be a whole"),
        (lambda pair: pair.generate(PROMPT, plain=1), "plain: 1 is not allowed; it must be True or False"),
        (lambda pair: pair.generate(PROMPT, max_new_tokens=0), "max_new_tokens: 0"),
        (lambda pair: pair.generate(PROMPT, stop=[""]), "stop: "),
        (lambda pair: pair.generate(PROMPT, stop=5), "stop: 5 is not allowed; it must be a text or a list"),
        (lambda pair: pair.generate(PROMPT, ban=5), "ban: 5 is not allowed; it must be a text or a list"),
        (lambda pair: pair.generate(PROMPT, ban=["\udc80"]), "in UTF-8"),
        (lambda pair: pair.generate(PROMPT, ban=""), "ban: '' is not allowed; it must be a text that is"),
        (lambda pair: pair.generate(PROMPT, ban=["a", ""]), "ban: '' is not allowed"),
        (lambda pair: pair.generate(PROMPT, stop_tokens=5), "stop_tokens: 5 is not allowed"),
        (lambda pair: pair.generate(PROMPT, logit_bias=[1]), "logit_bias: [1] is not allowed"),
        (lambda pair: pair.generate(PROMPT, logit_bias={1: "x"}), "a number for every token id"),
        (
            lambda pair: pair.generate(PROMPT, shape=5),
            "shape: 5 is not allowed; it must be a yggdrasil.Shape",
        ),
        (lambda pair: pair.generate(PROMPT, regex="a", choice=["b"]), "left out together with"),
        (lambda pair: pair.generate(""), "prompt: '' is not allowed"),
        (lambda pair: pair.generate("\udc80"), "text in UTF-8"),
        (lambda pair: pair.generate(5), "a text, a list of token ids, or a list of these"),
        (lambda pair: pair.generate([PROMPT, 5]), "a text, a list of token ids, or a list of these"),
        (lambda pair: pair.generate([10**6]), "made of token ids from 0 to"),
        (lambda pair: pair.generate([-1]), "prompt: -1 is not allowed; it must be made of token ids"),
        (lambda pair: pair.generate([PROMPT, [-1]]), "prompt: -1 is not allowed"),
        (lambda pair: pair.stream([-1]), "prompt: -1 is not allowed"),
        (lambda pair: pair.stream(None), "prompt: None is not allowed"),
        (lambda pair: pair.stream(5), "prompt: 5 is not allowed"),
        (lambda pair: pair.stream(b"a"), "prompt: b'a' is not allowed"),
        (lambda pair: pair.stream([]).complete(), "prompt: '' is not allowed"),
        (lambda pair: pair.stream(["a", "b"]), "prompt: 'a' is not allowed; it must be a list of tokens"),
        (lambda pair: pair.stream([{"role": "user"}]), "messages: {'role': 'user'} is not allowed"),
        (lambda pair: pair.stream([*MESSAGES, 5]), "messages: 5 is not allowed; it must be a list of mess"),
        (lambda pair: pair.stream([{**MESSAGES[0], "tool_calls": 5}]), "it must be a list of messages"),
        (lambda pair: pair.stream([{**MESSAGES[0], "tool_calls": [{}]}]), "a list of messages"),
        (
            lambda pair: pair.stream([{**MESSAGES[0], "tool_calls": [{"function": {"a": {1}}}]}]),
            "it must be a list of messages",
        ),
        (lambda pair: pair.generate(PROMPT, json_schema={"a": {1}}), "json_schema: {'a': {1}} is not"),
        (lambda pair: pair.generate(PROMPT, json_schema="{"), "json_schema: '{' is not allowed"),
        (
            lambda pair: pair.stream(PROMPT, shape=Shape(1, 2), plain=True),
            "shape: 'W=1 D=2 K=auto' is not allowed; it must be left out together with plain",
        ),
        (
            lambda pair: pair.stream(PROMPT, shape=Shape(1, 2), draft=False),
            "shape: 'W=1 D=2 K=auto' is not allowed; it must be left out together with draft=False",
        ),
        (
            lambda pair: pair.generate([PROMPT], draft=False),
            "draft: False is not allowed; it must be left out for a list",
        ),
        (lambda pair: pair.generate([PROMPT, "x" * 4000]), "shorter than the context"),
        (lambda pair: pair.generate([PROMPT], shape=Shape(1, 2)), "shape: 'W=1 D=2 K=auto'"),
        (lambda pair: pair.generate(PROMPT, shape=Shape(1, 99)), "depth: 99"),
        (lambda pair: pair.tree(PROMPT, {"temperature": 1}), "it must be a yggdrasil.SamplingConfig"),
        (lambda pair: pair.policy(depth="deep"), "depth: 'deep' is not allowed; it must be one of fixed"),
        (lambda pair: pair.chat([{"role": "user"}]), "a list of messages"),
        (lambda pair: pair.chat([]), "a list of messages"),
        (lambda pair: pair.chat(5), "messages: 5 is not allowed; it must be a text, or a list of messages"),
    ],
)
def test_bad_input_is_one_clear_line(pair: Pair, call: Callable[[Any], Any], complaint: str) -> None:
    with pytest.raises(YggError) as caught:
        call(pair)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_prompt_leaves_the_rows_of_batches_as_they_are(pair: Pair) -> None:
    batcher = pair._batcher
    with pytest.raises(ConfigError, match="shorter than the context"):
        pair.generate([PROMPT, "x" * 4000])
    assert pair._batcher is batcher


def test_a_shape_that_is_none_is_left_out(pair: Pair) -> None:
    alone = pair.generate(PROMPT, max_new_tokens=8, shape=None, plain=True)
    [batched] = pair.generate([PROMPT], max_new_tokens=8, shape=None)
    assert batched.text == alone.text


def test_a_message_may_have_calls_of_functions(pair: Pair) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    tokens = pair.stream([*MESSAGES, call, {**MESSAGES[0], "tool_calls": None}]).prompt
    assert '{"name": "look"}' in pair.tokenizer.decode(tokens)


def test_batches_go_on_after_one_that_was_interrupted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pair.generate(PROMPTS, max_new_tokens=8)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pair._batcher.stepper, "verify", lambda *args: interrupt())
    with pytest.raises(KeyboardInterrupt):
        pair.generate(PROMPTS, max_new_tokens=8)
    assert [one.text for one in pair.generate(PROMPTS, max_new_tokens=8)] == [one.text for one in expected]


def test_models_without_a_compiled_pair_are_compiled_with_progress(
    llama_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[tuple[str, ...], CompileConfig]] = []

    class Stopped(Exception):
        pass

    def compile_pair(*models: str, **options: Any) -> None:
        asked.append((models, options["config"]))
        with options["progress"].phase("check the pair", 1):
            pass
        raise Stopped

    monkeypatch.setattr(pipeline, "compile_pair", compile_pair)
    target, draft = llama_folders
    with pytest.raises(Stopped):
        load_pair(target=target, draft=draft)
    with pytest.raises(Stopped):
        load_pair(target=target)
    assert asked == [(llama_folders, CompileConfig()), ((target,), CompileConfig(draft_weights=AUTO))]
    assert "check the pair" in capfd.readouterr().err


def test_a_pair_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the target is missing"):
        load_pair(draft=str(tmp_path))
    with pytest.raises(UsageError, match="cannot be combined"):
        load_pair("tiny", target="a", draft="b")
    bad: Any = 5
    with pytest.raises(ConfigError, match="name: 5 is not allowed; it must be a text"):
        load_pair(bad)
    with pytest.raises(ConfigError, match="dataset: 5 is not allowed; it must be a text"):
        load_pair("tiny", dataset=bad)
    for name in ("unknown", ""):
        with pytest.raises(ArtifactError, match=f"no compiled pair named '{name}'"):
            load_pair(name)
    with pytest.raises(ArtifactError, match="no predictor named ''"):
        load_pair("tiny", dataset="")
    with pytest.raises(UsageError, match="cannot be combined"):
        load_pair("tiny", target="")
    for target in ("", "a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="model: .* is not allowed; it must be a folder"):
            load_pair(target=target)
    with pytest.raises(YggError, match="there is no such folder"):
        load_pair(target=str(tmp_path / "none"), draft=str(tmp_path / "none"))


def test_objects_show_what_they_are(pair: Pair) -> None:
    assert repr(pair) == "Pair('tiny': target target, draft draft, float32 on cpu, context 256)"
    assert repr(pair.tokenizer) == f"Tokenizer({tiny_pair.VOCAB} tokens)"
    run = pair.stream(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert repr(run) == "Run('', 0 tokens, 0.00 tokens a pass)"
    result = run.complete().result
    assert repr(result).startswith(f"Result({result.text!r}, 8 tokens, ")
    assert repr(TokenTree.root(5, 8)) == "TokenTree(1 nodes, depth 0)"
    stream = TextStream(pair.tokenizer, after=pair.tokens(PROMPT))
    stream.push(result.tokens)
    assert repr(stream).startswith(f"TextStream({stream.text!r}, 8 tokens")
    engine = f"Engine(context 256, token ids below {pair.engine.vocab}, steps in C++)"
    assert repr(pair.engine) == engine


def test_no_object_that_a_researcher_prints_fills_the_screen(pair: Pair) -> None:
    config = GenerateConfig(max_new_tokens=4, inspect=True)
    policies = [
        pair.policy(guard=guard, temperature=temperature)
        for guard in (True, False)
        for temperature in (0.0, 1.0)
    ]
    [step, *_] = pair.engine.generate(pair.tokens(PROMPT), pair.policy(shape=Shape(4, 4)), config)
    for shown in (*policies, pair.acceptance, pair.latency, step, pair.engine, pair.tree(PROMPT)):
        assert len(repr(shown)) < 2000
        assert " object at 0x" not in repr(shown)


def test_the_package_lists_its_public_names_alone() -> None:
    assert dir(yggdrasil) == sorted([*yggdrasil.__all__, "__version__"])
    assert yggdrasil.load_pair is api.load_pair
