"""Files in the working directory are data: no process of frame imports them, whatever they are called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frame.core.processes.bounded_process import BoundedProcess, Ready, Refused
from frame.core.processes.python_command import python_command
from tests.server.running import FAKE, Running

ROOT = Path(__file__).parents[2]
#: Libraries that processes of frame import.
LIBRARIES = ("uvicorn", "starlette", "pydantic", "msgspec", "jinja2", "numpy", "llguidance", "tokenizers", "torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds modules that leave a file behind when they are imported."""
    for library in LIBRARIES:
        (tmp_path / f"{library}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{library} ')\n")
    return tmp_path


def imported(folder: Path) -> str:
    ran = folder / "ran"
    return ran.read_text() if ran.exists() else ""


def test_a_command_run_as_a_module(folder: Path) -> None:
    command = [sys.executable, "-m", "frame", "plugins"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, imported(folder)) == (0, ""), done.stderr


def test_the_processes_of_a_server(folder: Path) -> None:
    running = Running(FAKE, cwd=folder)
    try:
        running.wait_ready()
    finally:
        running.process.terminate()
        running.wait()
    assert imported(folder) == ""


def test_a_process_that_answers_questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    process = BoundedProcess("template", {"config": {"model": {"model": str(folder)}}}, Ready | Refused)
    with pytest.raises(ValueError, match=r"config\.json"):  # it came as far as to read the checkpoint
        process.ask(Ready(), 60)
    process.close()
    assert imported(folder) == ""


def test_what_a_command_starts_is_safe_too(folder: Path) -> None:
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import uvicorn']))"
    (folder / "later.py").write_text(
        f"from frame.core.processes.python_command import leave_working_directory\nleave_working_directory()\n{code}\n"
    )
    subprocess.run([sys.executable, str(folder / "later.py")], cwd=folder, check=True, env=os.environ)
    assert imported(folder) == ""


def test_no_source_starts_python_with_the_working_directory() -> None:
    assert python_command("frame", "serve")[1:] == ["-P", "-m", "frame", "serve"]
    unsafe = re.compile(r"sys\.executable,\s*['\"]-[mc]")
    paths = [path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in paths if "testing" not in path.parts and unsafe.search(path.read_text())] == []
