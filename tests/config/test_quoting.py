"""Errors show a long value by its ends and its length, wherever it was given."""

import pytest
from pydantic import BaseModel, ValidationError

from frame.core.config.errors import ConfigError
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import add_config_flags, config_from_arguments
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.findings import predicate
from frame.quoting import cut_quotes, printable, quoted

DIGITS, WORD = "9" * 400, "x" * 400
SHOWN = "x" * 80 + "…" + "x" * 40


def test_a_short_value_is_shown_whole():
    for value in ("a", "it's", 7, 0.5, None, [1, "b"], {"a": 1}, "x" * 160):
        assert quoted(value) == repr(value)


def test_a_long_value_is_shown_by_its_ends_and_length():
    assert quoted(WORD) == f"'{SHOWN}' (400 characters)"
    assert quoted(int(DIGITS)) == f"{'9' * 80}…{'9' * 40} (400 characters)"
    assert quoted([WORD]) == f"['{'x' * 78}…{'x' * 38}'] (404 characters)"


def test_an_integer_that_python_does_not_write_out():
    assert quoted(10**5000) == "a number of too many digits"
    assert quoted([10**5000]) == "a value with a number of too many digits"


def test_quotations_of_a_sentence_are_cut():
    assert cut_quotes(f"no '{WORD}', but 'y'") == f"no '{SHOWN}' (400 characters), but 'y'"


class Numbers(BaseModel):
    few: int


def test_findings_of_pydantic():
    with pytest.raises(ValidationError) as raised:
        Numbers.model_validate({"few": WORD})
    assert predicate(raised.value.errors()[0]).endswith(f", got '{SHOWN}' (400 characters)")


FLAGS = [
    ["--max-model-len", DIGITS],
    ["--max-model-len", DIGITS + "k"],
    ["--max-model-len", "9" * 5000],
    ["--max-model-len", f"1.{DIGITS}k"],
    ["--max-num-seqs", DIGITS],
    ["--max-num-seqs", "-" + DIGITS],
    ["--port", DIGITS],
    ["--port", WORD],
    ["--gpu-memory-utilization", DIGITS],
    ["--gpu-memory-utilization", WORD],
    ["--scheduling-policy", WORD],
    ["--attention-backend", WORD],
    ["--kv-role", WORD],
    ["--dtype", WORD],
    ["--runner", WORD, "--convert", "embed"],
    ["--" + WORD],
    ["a", WORD],
    ["a", "--model", WORD],
    ["--help=" + WORD],
    ["--keep-weights=" + WORD],
    ["a", "--keep-weights", WORD],
    ["--hf-overrides", WORD],
    ["--hf-overrides", f'["{WORD}"]'],
    ["--hf-overrides." + WORD, "1", "--hf-overrides." + WORD + ".a", "2"],
    ["--hf-overrides.a", WORD, "--hf-overrides.a+", "2"],
    ["--config", "/" + WORD],
    ["--allowed-origins", "[" + WORD],
    ["--load-format", WORD],
    ["--profile-dir", WORD],
    ["--lora-root", WORD],
    ["--rpc-methods", "_" + WORD],
    ["--lora-modules", WORD],
    ["--plugin", WORD],
    ["--plugin." + WORD],
    ["--plugin." + WORD + ".a", "2"],
    ["--plugin.offload." + WORD, "2"],
    ["--plugin.offload.size", WORD],
    ["--plugin.offload.size", DIGITS, "--kv-connector", "offload"],
    ["--plugin.push.peers", WORD],
    ["--plugin.peer.peers", WORD],
    ["--plugin.lmcache.server", WORD],
    ["--kv-connector", WORD],
    ["--tool-call-parser", WORD],
    ["--speculative-config", WORD],
    ["--kv-offloading-size", WORD],
    ["--kv-events-config.publisher", WORD],
    ["--kv-transfer-config", WORD],
    ["--kv-transfer-config.kv_buffer_device", WORD],
    ["--optimization-level", DIGITS],
    ["--task", WORD],
]


def refusal(arguments, capsys):
    parser = FlagParser(prog="frame serve")
    add_config_flags(parser)
    try:
        config = config_from_arguments(parser.parse_args(arguments))
        Registry.load().check(config)
    except SystemExit as end:
        return capsys.readouterr().err.removesuffix("\n") if end.code else None
    except (ConfigError, PluginError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("arguments", FLAGS, ids=lambda arguments: " ".join(one[:30] for one in arguments))
def test_a_long_value_of_a_flag(arguments, capsys):
    said = refusal(arguments, capsys)
    if said is not None:  # of some the value is looked at later
        assert "\n" not in said
        longest = max(len(word) for word in said.split())
        assert longest < 200, said


@pytest.mark.parametrize(
    ("name", "shown"),
    [("10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1%eth0"), ("a\nb\ud800\x1b", r"a\nb\ud800\x1b"), ("ü", "ü")],
)
def test_the_name_that_a_stranger_gave_is_one_line_that_can_be_written(name: str, shown: str) -> None:
    assert printable(name) == shown
    assert printable(name).encode()
