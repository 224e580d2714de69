"""Completion scripts in the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from frame.core.cli.main import commands, main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("completion")
    files = {}
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["completion", shell]) == 0
        files[shell] = folder / f"_frame.{shell}"
        files[shell].write_text(printed.getvalue())
    return files


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def bash(script: Path, line: str) -> list[str]:
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_frame\n"
    code += "printf '%s\\n' \"${COMPREPLY[@]}\""
    return [word for word in run("bash", "--norc", "-c", code) if word]


def test_bash_completes_commands_flags_and_choices(script: dict[str, Path]) -> None:
    file = script["bash"]
    assert bash(file, "frame ") == list(commands())
    assert {"serve", "plugins"} < set(commands())
    assert bash(file, "frame se") == ["serve"]
    assert "--max-model-len" in bash(file, "frame serve --max-")
    assert bash(file, "frame serve --dtype bf") == ["bfloat16"]
    assert bash(file, "frame serve model --load-f") == ["--load-format"]
    assert bash(file, "frame plugins ch") == ["check"]
    assert "attention" in bash(file, "frame plugins --kind ")
    backends = ["triton", "triton-index", "triton-latent", "triton-sparse", "torch", "torch-index", "torch-latent"]
    assert bash(file, "frame serve --attention-backend t") == backends
    assert bash(file, "frame bench la") == ["latency"]
    assert bash(file, "frame bench serve --num-p") == ["--num-prompts"]
    assert bash(file, "frame bench serve --max-num-") == []
    assert bash(file, "frame bench latency --dtype bf") == ["bfloat16"]
    assert bash(file, "frame serve --port ") == []
    assert bash(file, "frame serve --config ") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_the_script(script: dict[str, Path]) -> None:
    code = f'autoload -Uz compinit; compinit -u -D; eval "$(cat {script["zsh"]})"; print $_comps[frame]'
    assert run("zsh", "-f", "-c", code) == ["_shtab_frame"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes(script: dict[str, Path]) -> None:
    def fish(line: str) -> list[str]:
        code = f"source {script['fish']}; complete -C '{line}'"
        return [one.split("\t")[0] for one in run("fish", "--no-config", "-c", code)]

    assert fish("frame ser") == ["serve"]
    assert fish("frame serve --dtype bf") == ["bfloat16"]
    assert "--max-model-len" in fish("frame serve --max-")
    assert fish("frame completion z") == ["zsh"]
    assert "latency" in fish("frame bench l")
    assert fish("frame bench serve --num-p") == ["--num-prompts"]
    assert fish("frame serve --num-p") == []


def test_every_setting_is_offered_and_no_foreign_one(script: dict[str, Path]) -> None:
    flags = set(bash(script["bash"], "frame serve -"))
    assert {"--max-num-seqs", "--api-key", "--metrics-sinks", "-tp"} <= flags
    assert "--swap-space" not in flags
