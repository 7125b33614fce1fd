"""TextStream: text is never revised, and complete at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.models.tokenizer import load_tokenizer
from yggdrasil.text.decoding import ByteDecoder, RecentDecoder
from yggdrasil.text.tokenizer import TextStream, Tokenizer

TEXT = "Zoë drank a café ☕ and saw 日本 🦊🦊; the end."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_pair.save_tokenizer(folder)
    return Tokenizer(folder / "tokenizer.json", "ygg compile")


def chunks(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def test_encoding_and_decoding_give_the_text_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([*tokenizer.encode("the fox"), 0]) == "the fox"  # the end of text is no text
    assert tokenizer.token_text(0) == "'<|end|>'"


@pytest.mark.parametrize("size", (1, 2, 3, 7))
def test_characters_of_several_tokens_are_never_emitted_half(tokenizer: Tokenizer, size: int) -> None:
    stream = TextStream(tokenizer)
    released = ""
    tokens = tokenizer.encode(TEXT)
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokens)  # some characters do span tokens
    for chunk in chunks(tokens, size):
        released += stream.push(chunk)
        assert TEXT.startswith(released)
        assert "\ufffd" not in released
    assert released + stream.finish() == stream.text == TEXT


def test_text_is_released_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    first, *rest = tokenizer.encode("日")
    assert len(rest) == 2
    assert stream.push([first]) == ""
    assert stream.push(rest[:1]) == ""
    assert stream.push(rest[1:]) == "日"
    assert stream.finish() == ""


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_steps_give_the_full_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=40))
    steps = [
        data.draw(st.lists(st.integers(0, tiny_pair.VOCAB - 1), min_size=size, max_size=size))
        for size in sizes
    ]
    stream = TextStream(tokenizer)
    chunks = [stream.push(step) for step in steps]
    chunks.append(stream.finish())
    whole = tokenizer.decode([token for step in steps for token in step])
    assert "".join(chunks) == stream.text == whole


def test_a_long_text_equals_its_full_decoding(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" ".join(tiny_pair.stories(6)) + TEXT)
    stream = TextStream(tokenizer, stop=("never said",))
    for chunk in chunks(tokens, 3):
        stream.push(chunk)
    stream.finish()
    assert stream.text == tokenizer.decode(tokens)
    assert not stream.stopped


@pytest.mark.parametrize("size", (1, 2, 5, 100))
def test_a_stop_text_across_steps_ends_the_stream_before_it(tokenizer: Tokenizer, size: int) -> None:
    stream = TextStream(tokenizer, stop=("STOP",))
    released = ""
    for chunk in chunks(tokenizer.encode("go on STO here STOP and never this"), size):
        released += stream.push(chunk)
        assert "go on STO here ".startswith(released)
    assert stream.stopped
    assert released + stream.finish() == stream.text == "go on STO here "


def test_the_earliest_stop_text_counts_whatever_their_order(tokenizer: Tokenizer) -> None:
    for stops in (("late", "early"), ("early", "late")):
        stream = TextStream(tokenizer, stop=stops)
        assert stream.push(tokenizer.encode("one early two late three")) == "one "
        assert stream.stopped


def test_what_could_begin_a_stop_text_is_held_until_it_cannot(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("abcd",))
    assert stream.push(tokenizer.encode("xxabc")) == "xx"
    assert stream.push(tokenizer.encode("abcab")) == "abcabc"
    assert stream.push(tokenizer.encode("z")) == "abz"
    assert stream.text == "xxabcabcabz"


def test_finish_releases_unfinished_stop_texts_and_characters(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("abcd",))
    assert stream.push(tokenizer.encode("xabc")) == "x"
    assert stream.finish() == "abc"
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("a日")[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_tokens_end_with_the_one_that_completes_a_stop_text(tokenizer: Tokenizer) -> None:
    parts = [tokenizer.encode(text) for text in ("Sure", "\n", "User", ":")]
    tokens = [token for part in parts for token in part]
    for size in (1, 2, 100):
        stream = TextStream(tokenizer, stop=("\nUser:", "User"))
        for chunk in chunks(tokens, size):
            stream.push(chunk)
        assert (stream.text, stream.num_tokens, stream.stopped) == (
            "Sure\n",
            len(tokens) - len(parts[-1]),
            True,
        )


@pytest.mark.parametrize("is_llama", (False, True), ids=("metaspace", "llama"))
def test_a_stream_after_a_prompt_keeps_the_blank_that_its_decoder_strips(
    tmp_path: Path, is_llama: bool
) -> None:
    sentence_piece = Tokenizer(
        tiny_pair.save_sentence_piece_tokenizer(tmp_path, is_llama=is_llama), "ygg compile"
    )
    text = " ".join(tiny_pair.stories(4))
    tokens = sentence_piece.encode(text)
    for num_prompt in (1, 2, 30, 200):
        prompt = tokens[:num_prompt]
        rest = tokens[num_prompt:]
        before = sentence_piece.decode(prompt)
        for size in (1, 5, 1000):
            stream = TextStream(sentence_piece, after=prompt)
            released = "".join(stream.push(chunk) for chunk in chunks(rest, size)) + stream.finish()
            assert before + released == text == before + stream.text
            assert stream.num_tokens == len(rest)
    # after nothing, the text begins
    assert TextStream(sentence_piece).push(tokens[:1]) == sentence_piece.decode(tokens[:1])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_bytes_of_tokens_are_the_text_that_the_library_decodes(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    assert tokenizer.is_byte_level
    any_tokens = st.lists(st.integers(0, tokenizer.num_tokens + 1), max_size=12)  # also special and unknown
    texts = st.text(alphabet="aé日🦊 ", max_size=9).map(tokenizer.encode)
    fast = ByteDecoder(tokenizer)
    plain = RecentDecoder(tokenizer, ())
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.one_of(any_tokens, texts))
        for decoder in (fast, plain):
            decoder.add(tokens)
        whole = plain.text(final=False).rstrip("\ufffd")
        assert fast.text(final=False).rstrip("\ufffd") == whole
        count = data.draw(st.integers(0, len(whole)))
        for decoder in (fast, plain):
            decoder.take(count)
    assert fast.text(final=True) == plain.text(final=True)


def test_added_tokens_that_no_letters_spell_are_their_own_bytes(tmp_path: Path) -> None:
    library = tiny_pair.save_tokenizer(tmp_path)
    library.add_tokens(["two words", "日本", "naïve"])
    library.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", "ygg compile")
    tokens = tokenizer.encode("the two words 日本 and naïve!")
    assert {"two words", "日本", "naïve"} <= set(tokenizer.pieces(tokens))
    assert tokenizer.bytes_of(tokens).decode(errors="replace") == tokenizer.decode(tokens)


@pytest.mark.parametrize("is_llama", (False, True), ids=("metaspace", "llama"))
def test_other_tokenizers_decode_tokens_together(tmp_path: Path, is_llama: bool) -> None:
    path = tiny_pair.save_sentence_piece_tokenizer(tmp_path, is_llama=is_llama)
    assert isinstance(Tokenizer(path, "ygg compile").decoder(), RecentDecoder)


def test_a_prompt_that_ends_within_a_character_is_no_context(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("日")
    stream = TextStream(tokenizer, after=[*tokenizer.encode("the fox"), first])
    assert stream.push(tokenizer.encode(" ran")) == " ran"
    assert TextStream(tokenizer, after=[first]).push([*rest, *tokenizer.encode("a")]) == tokenizer.decode(
        [*rest, *tokenizer.encode("a")]
    )


def test_a_stop_text_is_not_looked_for_in_the_prompt(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("fox ran",), after=tokenizer.encode("the fox"))
    assert stream.push(tokenizer.encode(" ran by")) == " ran by"
    assert not stream.stopped


def test_after_a_stop_text_nothing_more_is_released(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=("!",))
    assert stream.push(tokenizer.encode("hey! you")) == "hey"
    assert stream.push(tokenizer.encode(" there")) == ""
    assert stream.finish() == ""
    assert stream.text == "hey"


def test_a_missing_or_broken_tokenizer_names_its_path_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: missing or corrupt .*run `ygg compile`"):
        Tokenizer(tmp_path / "tokenizer.json", "ygg compile")
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ArtifactError, match="missing or corrupt"):
        Tokenizer(tmp_path / "tokenizer.json", "ygg compile")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer: .*must be a model with a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_file_that_asks_for_truncation_and_padding_gets_neither(tmp_path: Path) -> None:
    backend = tiny_pair.save_tokenizer(tmp_path).backend_tokenizer
    whole = backend.encode(TEXT).ids
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64, pad_id=0, pad_token=tiny_pair.END)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path / "tokenizer.json", "ygg compile").encode(TEXT) == whole
    assert Tokenizer(tmp_path / "tokenizer.json", "ygg compile").encode("a") == backend.encode("a").ids[:1]
    ours = load_tokenizer(str(tmp_path)).backend_tokenizer
    assert ours.encode(TEXT).ids == whole
    copied = tmp_path / "copied.json"  # as `ygg compile` writes it
    copied.write_text(ours.to_str())
    assert Tokenizer(copied, "ygg compile").encode(TEXT) == whole
    stored = json.loads(copied.read_text())
    assert (stored["truncation"], stored["padding"]) == (None, None)
