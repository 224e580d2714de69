"""What `frame route` says to arguments that it cannot use."""

from __future__ import annotations

import pytest

from frame.core.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no server is listed; name addresses, as in http://127.0.0.1:8000, or --servers FILE"),
        (["a:1", "--servers", "x"], "--servers FILE and addresses on the command line exclude each other"),
        (["--servers", "/none"], "the list of servers /none cannot be read: No such file or directory"),
        (["--prefill", "a:1"], "every listed server is for prefill only, so that none could answer"),
        (
            ["a:1", "--policy", "least-laod"],
            "no route policy 'least-laod'; there are: least-load, pairs, prefix, round-robin, text-prefix",
        ),
        (["a:1", "--plugin.pairs.min-body-bytes", "-1"], "option min_body_bytes of plugin 'pairs'"),
        (["a:1", "--max-retries", "many"], "--max-retries must be a whole number from 0 to 99, got 'many'"),
        (["a:1", "--health-seconds", "nan"], "--health-seconds must be seconds from 0.05 to 3600, got 'nan'"),
        (["a:1", "--kv-events", "5557"], "--kv-events '5557' is no address; write tcp://HOST:PORT or ipc:///PATH\n"),
        (
            ["a:1", "--kv-events", "tcp://*:1"],
            "--kv-events tcp://*:1 names no host; write the server's, as tcp://127.0",
        ),
        (
            ["a:1", "--kv-events", "tcp://a:1", "--kv-events-replay", "inproc://a"],
            "--kv-events-replay 'inproc://a' is no address; write tcp://HOST:PORT or ipc:///PATH\n",
        ),
        (
            ["a:1/v1"],
            "'a:1/v1' is no address of a server: /v1 does not belong there, since requests' own paths have it",
        ),
        (["a:1", "--kv-events-replay", "tcp://a:1"], "--kv-events-replay needs --kv-events, the address at which KV"),
        (["--servers", "x", "--kv-events", "tcp://a:1"], "--servers FILE and addresses on the command line exclude"),
        (
            ["a:1", "--kv-events", "tcp://a:1", "--kv-events-ranks", ""],
            "--kv-events-ranks must be a whole number from 1 to 64, got ''",
        ),
        (["a:1", "--kv-events-ranks", "2"], "--kv-events-ranks needs --kv-events, the addresses at which"),
        (["a:1", "--kv-events-curve-key", "k" * 40], "--kv-events-curve-key needs --kv-events, the addresses at which"),
        (
            ["--servers", "x", "--kv-events-ranks", "2"],
            "--servers FILE says how many data ranks a server has, by ranks=",
        ),
        (["a:1", "--kv-events-ranks", "0"], "ranks must be a whole number from 1 to 64, got '0'"),
        (
            ["a:1", "--kv-events", "tcp://a:1", "--kv-events-curve-key", "x"],
            "--kv-events-curve-key must be a public CURVE key of 40 characters",
        ),
        (["a:1", "--plugin.prefix.max-blocks", "1"], "option max_blocks of plugin 'prefix'"),
        (["a:1", "--server-key", ""], "--server-key must be a key of ASCII characters, and not empty"),
        (["a:1", "--api-key", ""], "api_key must not be empty"),
        (["a:1", "--ssl-keyfile", "x"], "ssl_keyfile needs ssl_certfile"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *arguments]) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_options_of_another_policy_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--host", "192.0.2.1"]  # an address that no machine has, so that the command ends
    options = ["--plugin.pairs.min-body-bytes", "5", "--plugin.prefix.max-blocks", "4096"]
    assert main(["route", "a:1", "--policy", "prefix", *options, *nowhere]) == 1
    errors = capsys.readouterr().err
    said = "options of plugin 'pairs' have no effect (min_body_bytes): this front's route policy is 'prefix'"
    assert said in errors
    assert errors.count("have no effect") == 1
