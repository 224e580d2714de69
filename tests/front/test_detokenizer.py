from __future__ import annotations

import time

import pytest
from hypothesis import given, settings, strategies as st

from frame.core.front.detokenizer import PieceDetokenizer, WindowDetokenizer, make_detokenizer

TEXTS = st.text(alphabet="aéß日本語😀👩‍👩‍👧 .,\n" + "the quick", max_size=40)


def cut(ids, sizes):
    """The ids in chunks of the given sizes, the rest at the end."""
    start = 0
    for size in sizes:
        yield ids[start : start + size]
        start += size
    yield ids[start:]


def stream(detokenizer, chunks):
    deltas = [detokenizer.push(chunk) for chunk in chunks]
    return deltas, detokenizer.flush()


@pytest.fixture(scope="module", params=["pieces", "window"])
def make(request, tokenizer):
    def detokenizer(context=(), skipped=frozenset()):
        if request.param == "pieces":
            return PieceDetokenizer(tokenizer.pieces, context, skipped)
        return WindowDetokenizer(tokenizer.decode_raw, context, skipped)

    return detokenizer


@given(text=TEXTS, sizes=st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=150, deadline=None)
def test_joined_deltas_are_the_text_and_no_delta_holds_half_a_character(make, tokenizer, text, sizes):
    ids = tokenizer.encode(text)
    deltas, rest = stream(make(), cut(ids, sizes))
    assert "".join(deltas) + rest == tokenizer.decode(ids) == text
    assert rest == ""
    assert all("\ufffd" not in delta for delta in deltas)


@given(ids=st.lists(st.integers(0, 399), max_size=40), sizes=st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=150, deadline=None)
def test_any_ids_are_decoded_as_by_the_library(tokenizer, ids, sizes):
    deltas, rest = stream(PieceDetokenizer(tokenizer.pieces, (), frozenset()), cut(ids, sizes))
    assert "".join(deltas) + rest == tokenizer.native.backend_tokenizer.decode(ids, skip_special_tokens=False)


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_a_prompt_may_end_inside_a_character(make, tokenizer, text):
    ids = tokenizer.encode("日😀" + text)
    for split in range(1, min(7, len(ids))):
        before = tokenizer.decode(ids[:split]).rstrip("\ufffd")
        deltas, rest = stream(make(context=ids[:split]), [[token] for token in ids[split:]])
        assert before + "".join(deltas) + rest == "日😀" + text


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = [*tokenizer.encode("hello"), tokenizer.eos_token_id, *tokenizer.encode(" world")]
    hidden, _ = stream(make_detokenizer(tokenizer, [1], True, True), [ids])
    shown, _ = stream(make_detokenizer(tokenizer, [1], False, True), [ids])
    assert ("".join(hidden), "".join(shown)) == ("hello world", "hello<eos> world")


def test_an_unfinished_character_comes_as_a_replacement_at_the_end(make, tokenizer):
    ids = tokenizer.encode("é")
    ids = ids if len(ids) > 1 else tokenizer.encode("👩")
    deltas, rest = stream(make(), [ids[:1]])
    assert (deltas, rest) == ([""], "\ufffd")


def test_broken_text_is_not_held_back_for_ever(make, tokenizer):
    stray = tokenizer.native.backend_tokenizer.token_to_id("Ģ")  # a continuation byte
    assert stray is not None
    detokenizer = make()
    assert len("".join(detokenizer.push([stray]) for _ in range(20))) >= 12


@given(text=st.text(alphabet="the hello world é😀日.", max_size=30), sizes=st.lists(st.integers(0, 4), max_size=30))
@settings(max_examples=150, deadline=None)
def test_byte_fallback_keeps_spaces_after_the_prompt(fallback_tokenizer, text, sizes):
    tokenizer = fallback_tokenizer
    assert tokenizer.pieces is not None
    prompt, ids = tokenizer.encode("hello"), tokenizer.encode("hello" + text)
    if ids[: len(prompt)] != prompt:
        return
    for detokenizer in (
        make_detokenizer(tokenizer, prompt, True, True),
        WindowDetokenizer(tokenizer.decode_raw, prompt[-5:], tokenizer.special_ids),
    ):
        deltas, rest = stream(detokenizer, cut(ids[len(prompt) :], sizes))
        assert "".join(deltas) + rest == text
        assert all("\ufffd" not in delta for delta in deltas)


@given(ids=st.lists(st.integers(5, 15), max_size=20))
@settings(max_examples=100, deadline=None)
def test_decoders_whose_text_of_a_token_depends_on_its_neighbours(word_tokenizer, ids):
    assert word_tokenizer.pieces is None
    prompt = word_tokenizer.encode("hello world")
    deltas, rest = stream(make_detokenizer(word_tokenizer, prompt, True, True), [[token] for token in ids])
    assert "".join(deltas) + rest == word_tokenizer.decode([*prompt, *ids])[len("hello world") :]


def test_spaces_between_special_tokens(word_tokenizer):
    ids = [7, 2, 2, 8]
    apart, _ = stream(make_detokenizer(word_tokenizer, [6], False, True), [ids])
    together, _ = stream(make_detokenizer(word_tokenizer, [6], False, False), [ids])
    assert ("".join(apart), "".join(together)) == (" hello <eos> <eos> world", " hello <eos><eos> world")


def test_speed(tokenizer):
    ids = tokenizer.encode("the quick brown fox 日本語 " * 200)
    detokenizer = make_detokenizer(tokenizer, [1], True, True)
    start = time.thread_time()
    for token in ids:
        detokenizer.push([token])
    assert len(ids) / (time.thread_time() - start) > 20_000
