"""Flags, help by group, and command line over file over default."""

from __future__ import annotations

import re

import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import add_config_flags, config_from_arguments
from frame.core.config.leaves import leaves, sections
from frame.core.config.tree import FrameConfig


@pytest.fixture
def parser():
    parser = FlagParser(prog="frame serve")
    add_config_flags(parser)
    return parser


def parse(parser: FlagParser, *arguments: str) -> FrameConfig:
    return config_from_arguments(parser.parse_args(list(arguments)))


def test_no_arguments_are_the_defaults(parser):
    assert parse(parser) == FrameConfig()


def test_no_two_sections_have_a_setting_of_one_name():
    fields = [type(getattr(FrameConfig(), section)).model_fields for section in sections()]
    assert sum(map(len, fields)) == len(leaves())


def test_every_setting_has_a_flag(parser):
    for own in leaves().values():
        assert own.flag in parser.format_help() or own.flag in parser._option_string_actions


def test_json_dotted_and_appended_forms_are_equal(parser):
    expected = FrameConfig.from_flat(hf_overrides={"rope": {"factor": 4}, "names": ["a", "b"]})
    json = parse(parser, "--hf-overrides", '{"rope": {"factor": 4}, "names": ["a", "b"]}')
    dotted = parse(parser, "--hf-overrides.rope.factor", "4", "--hf-overrides.names+=a", "--hf_overrides.names+", "b")
    mixed = parse(parser, "--hf-overrides", '{"names": ["a", "b"]}', "--hf-overrides.rope.factor=4")
    assert json == dotted == mixed == expected


def test_plugin_settings_stay_text_until_the_plugin_reads_them(parser):
    config = parse(parser, "--plugin.my-disk.max-bytes", "4", "--plugin.my-disk.on", "--plugin.x.list", "[1]")
    assert config.plugin == {"my-disk": {"max_bytes": "4", "on": "true"}, "x": {"list": [1]}}


def test_forms_of_flags(parser):
    config = parse(
        parser, "/m", "--max_model_len=-1", "--no-async-scheduling", "-tp", "2", "--enforce_eager",
        "--served-model-name", "a", "b", "--max-num-batched-tokens", "8k", "--dtype", "half",
        "--kv-transfer-config", '{"kv_connector": "disk"}', "--trust-remote-code", "--no-trust-remote-code",
        "--allowed-origins", '["*"]',
    )  # fmt: skip
    assert config == FrameConfig.from_flat(
        model="/m", max_model_len=-1, async_scheduling=False, tensor_parallel_size=2, enforce_eager=True,
        served_model_name=["a", "b"], max_num_batched_tokens=8000, dtype="float16", kv_connector="disk",
        allowed_origins=["*"],
    )  # fmt: skip


def test_command_line_beats_file_beats_default(parser, tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text(
        "model: /from-file\nport: 9000\nmax-num-seqs: 3\ncache:\n  block_size: 32\n"
        "plugin:\n  disk: {folder: /x, size: 1}\n"
    )
    config = parse(parser, "--config", str(file), "/typed", "--port", "9001", "--plugin.disk.size", "2")
    assert config == FrameConfig.from_flat(
        model="/typed", port=9001, max_num_seqs=3, block_size=32, plugin={"disk": {"folder": "/x", "size": "2"}}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "no setting 'prot' (did you mean port"),
        ("port: 1\nport: 2", "port is set twice (line 2)"),
        ("port: 1\nserver: {port: 2}", "port is set twice"),
        ("cache: {port: 2}", "setting 'port' does not belong to 'cache'"),
        ("- a", "must hold settings by name, got list"),
        ("a: [", "is not valid YAML: line 1, column 5"),
        ("server:\n  prot: 1", "no setting 'prot' in 'server' (did you mean port?)"),
        ("plugin: &own {self: *own}", "refers to itself"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("port: 99999", "port must be less than or equal to 65535, got 99999"),
    ],
)
def test_wrong_files_are_named(parser, tmp_path, text, message):
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(parser, "--config", str(file))


def test_missing_file(parser):
    with pytest.raises(ConfigError, match=r"configuration file /nope\.yaml cannot be read: No such file"):
        parse(parser, "--config", "/nope.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-modl-len", "3"], "no flag '--max-modl-len' (did you mean --max-model-len"),
        (["--max-model", "3"], "no flag '--max-model'"),
        (["--zzz"], "no flag '--zzz'; frame serve --help lists them"),
        (["--max-num-seqs", "x"], "argument --max-num-seqs: 'x' is no integer"),
        (["--block-size", "x"], "4k (4000) or 4K (4096), or auto"),
        (["--gpu-memory-utilization", "x"], "argument --gpu-memory-utilization: invalid number value: 'x'"),
        (["--hf-overrides", "[1]"], "'[1]' must be a JSON object"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "a.b: a already has the value 1"),
        (["--plugin.disk", "1"], "--plugin.disk: write --plugin.NAME.FIELD VALUE"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--seed", "3", "b"], "unexpected argument 'b'"),
        (
            ["a", "--keep-weights", "maybe"],
            "--keep-weights takes no value, got 'maybe'; write --keep-weights or --no-ke",
        ),
        (
            ["--keep_weights", "on", "a"],
            "unexpected argument 'a'; 'on' was taken for MODEL: --keep-weights takes no value, write --keep-weights",
        ),
        (["--keep-weights", "--seed", "3", "a", "b"], "unexpected argument 'b'; frame serve --help shows what"),
        (
            ["a", "--keep-weights=false"],
            "--keep-weights takes no value, got 'false'; write --keep-weights or --no-keep-",
        ),
        (
            ["--enable-lora", "True"],
            "--enable-lora takes no value, got 'True'; write --enable-lora or --no-enable-lora",
        ),
        (
            ["--no-enable-lora=1", "a"],
            "--no-enable-lora takes no value, got '1'; write --enable-lora or --no-enable-lo",
        ),
        (["a", "--async-scheduling", "on"], "--async-scheduling takes no value, got 'on'; write --async-scheduling or"),
        (["--help=cahce"], "no group or flag 'cahce' (did you mean cache"),
    ],
)
def test_mistakes_end_with_one_sentence_and_status_2(parser, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_two_models_are_refused(parser):
    with pytest.raises(ConfigError, match="two models are named: '/a' and --model '/b'"):
        parse(parser, "/a", "--model", "/b")


@pytest.mark.parametrize(
    ("name", "there", "absent"),
    [
        ("cache", "--block-size", "--port"),
        ("CacheConfig", "--block-size", "--port"),
        ("max-model-len", "--max-model-len", "--dtype"),
        ("--max_model_len", "--max-model-len", "--dtype"),
        ("all", "--block-size", "--swap-space"),
        ("model", "--hf-overrides", "--port"),
    ],
)
def test_help_of_a_part(parser, capsys, name, there, absent):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([f"--help={name}"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert there in text
    assert absent not in text


def test_plain_help_lists_the_groups_only(parser):
    text = parser.format_help()
    assert all(section in text for section in sections())
    assert "--block-size" not in text
