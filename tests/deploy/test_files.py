"""The files for operators: settings that exist, paths that are there, a unit that systemd reads, a whole wheel."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from frame.core.cli.serve import ServeCommand
from frame.core.config.flag_parser import FlagParser
from frame.core.config.flags import config_from_arguments
from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.interfaces import Setup

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STATIC = ROOT / "plugins" / "endpoints" / "static"


def serve(*words: str) -> FrameConfig:
    parser = FlagParser(prog="frame serve")
    ServeCommand(Setup()).add_arguments(parser)
    return config_from_arguments(parser.parse_args(words))


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M))
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def test_the_settings_file_is_one() -> None:
    config = serve("--config", str(DEPLOY / "serve.yaml"))
    assert config.server.api_key == ["change-me"]
    Registry.load().check(config)


def test_the_image_copies_what_is_there_and_starts_a_command_that_exists() -> None:
    found = instructions()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, rest in found:
        if name == "COPY" and not rest.startswith("--from"):
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists(), rest
        if "[fast" in rest:
            wanted = re.search(r"\[([\w,]+)\]", rest)
            assert wanted is not None
            assert set(wanted[1].split(",")) <= set(extras)
    last = dict(found)
    words = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert words[:2] == ["frame", "serve"]
    config = serve(*words[2:])
    assert str(config.server.port) == last["EXPOSE"]
    assert last["USER"] == "frame"
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[-1], "HEALTHCHECK", "exec")


def test_nothing_that_the_package_needs_is_left_out_of_the_image() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert not {"core", "plugins", "kernels", "src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} & set(
        ignored
    )


def test_compose_names_files_that_are_there() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"frame", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).is_file(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    build = compose["services"]["frame"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    shell = compose["services"]["frame"]["entrypoint"][2].replace("$$(cat /run/secrets/frame_key)", "key")
    words = shlex.split(shell)
    assert words[:3] == ["exec", "frame", "serve"]
    assert serve(*words[3:]).server.api_key == ["key"]


def test_a_key_from_the_command_of_compose_has_no_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("abc\n")
    shown = subprocess.run(
        ["sh", "-c", f'printf %s "$(cat {tmp_path}/key)"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "abc"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "frame.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    words = shlex.split(start)
    assert words[1] == "serve"
    assert serve("--config", str(DEPLOY / Path(words[3]).name)).server.port == 8000
    unit = tmp_path / "frame.service"
    unit.write_text(text.replace(words[0], "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "frame.service" in line]
    assert (done.returncode, ours) == (0, []), done.stderr
    drain = serve("--config", str(DEPLOY / "serve.yaml")).server.drain_seconds
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert int(stop) > drain + 5


@pytest.mark.slow
def test_the_wheel_holds_every_file_that_is_read_at_run_time(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", "__pycache__", "site")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"frame/plugins/endpoints/static/{file.name}" for file in STATIC.iterdir()} <= names
    assert {"frame/plugins/models/demo/model.safetensors", "frame/kernels/experts.json", "frame/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "frame/tests"))]
