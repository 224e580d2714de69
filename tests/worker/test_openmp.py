"""How threads wait is decided before torch is imported, and never against the user."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frame.core.processes.child import spawn
from frame.core.processes.messages import EngineReport
from frame.core.startup.openmp import SPIN_COUNT, WAITING, child_environment
from frame.offline import torch_import

TELL = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ.get('GOMP_SPINCOUNT', 'unset'))"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)


async def _spin_count_of_child(file: Path) -> str:
    child = await spawn([sys.executable, "-c", TELL, str(file)], [], EngineReport, [], {})
    await child.process.wait()
    await child.stop(0)
    return file.read_text()


def test_children_spin_briefly(tmp_path: Path) -> None:
    assert asyncio.run(_spin_count_of_child(tmp_path / "spin_count")) == SPIN_COUNT


def test_a_variable_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # says nothing about waiting
    assert child_environment()["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in child_environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert asyncio.run(_spin_count_of_child(tmp_path / "spin_count")) == "77"


def test_only_the_import_of_torch_sees_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    code = (
        "import os, sys\nfrom frame.offline.torch_import import import_torch\nimport_torch()\nimport_torch()\n"
        "sys.exit('torch' not in sys.modules or 'GOMP_SPINCOUNT' in os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch has another OpenMP library")
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


@pytest.mark.some(1)
@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_nothing_is_collected_while_torch_is_imported(
    collects: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the program collects, and what it froze, is afterwards as it was."""
    phases: list[str] = []
    made: list[list[int]] = []

    def large_import(name: str) -> None:
        gc.callbacks.append(note)
        made.extend([] for _ in range(50_000))
        gc.callbacks.remove(note)

    def note(phase: str, info: dict[str, Any]) -> None:
        phases.append(phase)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(torch_import, "import_module", large_import)
    assert gc.isenabled()
    try:
        if frozen:
            gc.freeze()
        if not collects:
            gc.disable()
        torch_import.import_torch()
        assert gc.isenabled() == collects
        assert bool(gc.get_freeze_count()) == frozen  # how many they are changes as some are let go
    finally:
        gc.enable()
        gc.unfreeze()
    assert len(made) == 50_000
    assert not phases


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("first", "environment", "late"),
    [
        ("import torch", {}, True),
        pytest.param("import torch", {"OMP_WAIT_POLICY": "PASSIVE"}, False, marks=pytest.mark.matrix),
        pytest.param("import torch; torch.set_num_threads(1)", {}, False, marks=pytest.mark.matrix),
        ("pass", {}, False),
    ],
)
def test_a_program_that_imports_torch_first_is_warned(
    first: str, environment: dict[str, str], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    code = (
        f"{first}\nfrom frame.offline.torch_import import import_torch, spins_long\nimport_torch()\nimport_torch()\n"
        "print(spins_long())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{late}\n"


@pytest.mark.some(1)
def test_the_llm_logs_the_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from frame import LLM

    monkeypatch.setattr("frame.offline.engine.spins_long", lambda: True)
    with LLM(num_threads=1, max_num_seqs=2):
        pass
    assert "torch was imported before frame" in caplog.text
    assert f"GOMP_SPINCOUNT={SPIN_COUNT}" in caplog.text
