from __future__ import annotations

from collections.abc import Iterator

import pytest

from frame.core.cli.main import main
from frame.core.cli.terminal import TerminalClient


@pytest.mark.parametrize(
    ("command", "method"), [(["chat", "-q", "Hello"], "chat"), (["complete", "-q", "The sea"], "complete")]
)
def test_ctrl_c_ends_the_one_answer_with_its_own_status(
    command: list[str], method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def answer(_: TerminalClient, question: object) -> Iterator[str]:
        asked.append(question)
        yield "It is "
        if len(asked) > 1:
            raise KeyboardInterrupt
        yield "blue."

    monkeypatch.setattr(TerminalClient, method, answer)
    assert main([*command, "--model-name", "m"]) == 0
    assert main([*command, "--model-name", "m"]) == 130
    assert capsys.readouterr().out == "It is blue.\nIt is \n"


def test_ctrl_c_ends_one_answer_of_a_conversation_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[list[dict[str, str]]] = []
    typed = iter(["first", "", "second"])

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    def answer(_: TerminalClient, messages: list[dict[str, str]]) -> Iterator[str]:
        heard.append([dict(message) for message in messages])
        yield "half"
        if len(heard) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(TerminalClient, "chat", answer)
    assert main(["chat", "--model-name", "m", "--system-prompt", "be brief"]) == 0
    assert [message["content"] for message in heard[1]] == ["be brief", "first", "half", "second"]
    assert capsys.readouterr().out == "half\nhalf\n"
