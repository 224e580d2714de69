"""The frames of a stream: a piece of text costs less than other choices, and gives the same bytes."""

from __future__ import annotations

import json

import pytest

from frame.plugins.endpoints.openai_answers import Delta, DeltaChoice, Frames, TextChoice

pytestmark = pytest.mark.product


def chat_piece(index: int, text: str) -> DeltaChoice:
    return DeltaChoice(index, Delta(content=text))


@pytest.mark.parametrize("piece", [chat_piece, TextChoice])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_piece_of_text_is_encoded_as_any_choice(piece, with_usage):
    frames = Frames("cmpl-1", "kind", 5, 'a "model"', "fp_0", with_usage, piece)
    for index in (0, 3, 0):
        for text in ("a", "", ' "quoted"\n\\', "\0text\0", "日本😀", "\u2028"):
            data = frames.text(index, text)
            assert data == frames.choice(piece(index, text))
            assert json.loads(data.removeprefix(b"data: "))["choices"][0]["index"] == index
