"""The command `frame`: subcommands, exit statuses, and how light it is."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from frame.core.cli import main as cli
from frame.core.cli.main import main
from frame.core.config.errors import ConfigError
from frame.core.interfaces.endpoint import Command
from frame.interfaces import Setup


class Stub(Command):
    help = "A stub."
    raises: type[BaseException] | None = None

    def add_arguments(self, parser):
        parser.add_argument("--number", type=int, default=1)

    def run(self, arguments):
        if self.raises is not None:
            raise self.raises("the cause")
        return arguments.number


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(cli, "_find", lambda name: Stub(Setup(plugin="tests:stub")) if name == "stub" else None)
    monkeypatch.setattr(Stub, "raises", None)
    return Stub


def test_status_is_the_commands(stub):
    assert main(["stub", "--number", "7"]) == 7


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (ConfigError, 1)])
def test_errors_end_with_one_sentence(stub, monkeypatch, capsys, error, status):
    monkeypatch.setattr(Stub, "raises", error)
    assert main(["stub"]) == status
    assert capsys.readouterr().err == ("frame: the cause\n" if status == 1 else "")


def test_unknown_command_names_the_near_ones(capsys):
    assert main(["serv"]) == 2
    assert "no command 'serv' (did you mean serve" in capsys.readouterr().err
    assert main(["--port", "1"]) == 2
    assert "no flag '--port'; commands come first" in capsys.readouterr().err


def test_no_command_and_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("frame 0.")


def test_help_lists_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "serve" in text
    assert "worker" not in text


@pytest.mark.parametrize("command", ["import frame", "import frame.plugins", "m(['plugins'])", "m(['--help'])"])
def test_light_and_without_torch(command):
    prefix = "from frame.core.cli.main import main as m\n" if command.startswith("m(") else ""
    code = f"{prefix}{command}\nimport sys\nassert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_import_is_quick():
    """The least processor time of several runs, against an interpreter that imports nothing."""

    def seconds(code: str) -> float:
        _, status, used = os.wait4(os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ), 0)
        assert status == 0
        return used.ru_utime + used.ru_stime

    bare = min(seconds("pass") for _ in range(5))
    assert min(seconds("import frame") for _ in range(5)) - bare < 0.3


def test_python_dash_m(capsys):
    done = subprocess.run([sys.executable, "-m", "frame", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("frame ")


def test_help_of_a_command_is_found_both_ways_and_ends_with_examples(capsys):
    texts = []
    for line in (["help", "plugins"], ["plugins", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(line)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].rstrip().endswith("frame plugins check my-plugin")


def test_examples_in_help_can_be_typed():
    """Every line parses: its command exists and takes its flags."""
    for name, command in cli.commands().items():
        assert command.examples or command.__class__.__module__.startswith("tests"), f"frame {name} has no examples"
        for line in command.examples:
            words = shlex.split(line.replace("<(", " ").replace(")", " "), comments=True)
            words = words[: words.index(">")] if ">" in words else words
            start = words.index("frame") + 1
            parser = cli.FlagParser(prog=f"frame {name}")
            assert words[start] == name, line
            command.add_arguments(parser)
            if not words[-1].startswith("--help"):
                parser.parse_args(words[start + 1 :])


def test_an_interrupt_while_python_imports_ends_without_a_traceback() -> None:
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'frame.core.cli.main':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nfrom frame.core.cli.entry import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_full_disk_behind_the_output_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "frame", "plugins"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "frame: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        (["--keep-weights", "/may/be"], "; '/may/be' was taken for MODEL: --keep-weights takes no value, write"),
        (
            ["--no-keep-weights", "/may/be"],
            "--no-keep-weights takes no value, write --keep-weights or --no-keep-weights",
        ),
        (["--keep-weights", "/may/be", "--model", "a"], "'/may/be' and --model 'a'; '/may/be' was taken for MODEL: --"),
        (["--keep_weights", "/may/be", "--port", "0"], "'/may/be' was taken for MODEL: --keep-weights takes no value"),
    ],
)
def test_a_word_after_a_switch_may_be_meant_for_it(capsys, arguments, ends):
    """No folder tells which: both readings are named."""
    assert main(["serve", *arguments]) == 1
    error = capsys.readouterr().err
    assert ends in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["/may/be", "--keep-weights"], ["--keep-weights", "--port", "1", "/may/be"]])
def test_a_word_elsewhere_is_the_model(capsys, arguments):
    assert main(["serve", *arguments]) == 1
    error = capsys.readouterr().err
    assert "/may/be" in error
    assert "takes no value" not in error


def test_errors_about_something_else_do_not_name_the_word(capsys, tmp_path):
    assert main(["serve", "--keep-weights", str(tmp_path), "--kv-connector", "none"]) == 1
    assert "takes no value" not in capsys.readouterr().err
