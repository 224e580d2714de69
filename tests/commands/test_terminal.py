from __future__ import annotations

import io
import ssl
from collections.abc import Iterator

import pytest

from frame.core.cli.main import main
from frame.plugins.commands.terminal import TerminalClient, _unreachable


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


@pytest.mark.parametrize(
    ("flags", "variables", "presented"),
    [
        ([], {}, None),
        ([], {"OPENAI_API_KEY": "theirs"}, "theirs"),
        ([], {"OPENAI_API_KEY": "theirs", "FRAME_API_KEY": "ours"}, "ours"),
        (["--api-key", "mine"], {"FRAME_API_KEY": "ours"}, "mine"),
    ],
    ids=["none", "OPENAI_API_KEY", "FRAME_API_KEY first", "the flag above all"],
)
def test_a_key_comes_from_the_flag_or_the_environment(
    flags: list[str], variables: dict[str, str], presented: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str | None] = []

    def answer(client: TerminalClient, _: str) -> Iterator[str]:
        keys.append(client._key)
        yield "blue."

    for name in ("OPENAI_API_KEY", "FRAME_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TerminalClient, "complete", answer)
    assert main(["complete", "-q", "The sea", "--model-name", "m", *flags]) == 0
    assert keys == [presented]


def test_the_help_says_where_a_key_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "FRAME_API_KEY or OPENAI_API_KEY" in " ".join(capsys.readouterr().out.split())


def test_failures_of_tls_say_what_to_do() -> None:
    wrong_name = ssl.SSLCertVerificationError("no")
    wrong_name.verify_code, wrong_name.verify_message = 62, "Hostname mismatch, certificate is not valid for 'a'."
    assert "is not for this address: Hostname mismatch" in _unreachable("https://a:1", wrong_name)
    no_tls = ssl.SSLError("no")
    no_tls.reason = "WRONG_VERSION_NUMBER"
    assert "try --url http://a:1" in _unreachable("https://a:1", no_tls)
    assert (
        _unreachable("http://a:1", OSError(111, "Connection refused"))
        == "no server answers at http://a:1: Connection refused; `frame serve` starts one, --url names another"
    )


def test_only_answers_go_into_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The sea is\nA book is\n"))
    monkeypatch.setattr(TerminalClient, "complete", lambda _, prompt: iter([prompt.upper()]))
    assert main(["complete", "--model-name", "m"]) == 0
    assert capsys.readouterr() == ("THE SEA IS\nA BOOK IS\n", "")


def test_a_person_is_invited_and_prompted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Typed("Hello\n"))
    monkeypatch.setattr(TerminalClient, "chat", lambda _, messages: iter(["Hello to you."]))
    assert main(["chat", "--model-name", "m"]) == 0
    answers, prompts = capsys.readouterr()
    assert answers == "Hello to you.\n"  # stdout is no terminal here, so the prompt goes to stderr
    assert prompts == "Chatting with m; end of input (ctrl-D) quits.\n> > \n"
