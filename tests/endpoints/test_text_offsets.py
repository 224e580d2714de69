"""Where the tokens of a completion begin in its text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from frame.plugins.endpoints.openai_logprobs import TextPlace, TokenTexts

PIECES = [b"<s>", b" once", b" upon", b"\xe2\x82", b"\xac", b"!", b"</s>"]


def texts(ids: list[int], place: TextPlace) -> list[int]:
    positions: list[Any] = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
    return TokenTexts(PIECES.__getitem__, as_ids=False).text(ids, positions, 1, place).text_offset


def test_offsets_of_an_echoed_prompt_point_into_the_text_and_never_run_backwards() -> None:
    place = TextPlace()
    place.enter_prompt("once upon\u20ac")  # as it was sent: without a start token and the first space
    echoed = texts([0, 1, 2, 3, 4], place)
    place.leave_prompt()
    drawn = texts([5, 5, 6], place)
    assert echoed == [0, 0, 4, 9, 9]
    assert drawn == [10, 11, 12]


def test_the_pieces_of_a_stream_go_on_where_the_last_one_ended() -> None:
    place = TextPlace()
    assert texts([1, 3], place) == [0, 5]
    assert texts([4, 5], place) == [5, 6]
