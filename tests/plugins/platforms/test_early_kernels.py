"""Kernels that are compiled while torch is imported are those that steps launch, and nobody compiles them twice."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.plugins.platforms.cuda.compile import early_kernels, rehearsal, specializations
from frame.plugins.platforms.cuda.compile.absent_cuda import AbsentCuda, CompilingAhead
from frame.plugins.platforms.cuda.compile.early_kernels import EarlyKernels, begin, facts_of, take, wanted
from frame.testing import make_setup
from tests.snapshots.early_kernels import H200, config_of, rehearsed

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or not rehearsal.can_rehearse(), reason="nothing is compiled"
)
QWEN = "Qwen3 0.6B"
NOT_PLAIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"dtype": "float16"}),
    ({}, {"block_size": 32}),
    ({}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({}, {"attention_backend": "torch"}),
    ({"torch_dtype": "float32"}, {}),
    ({"sliding_window": 4096}, {}),
    ({"quantization_config": {"quant_method": "fp8"}}, {}),
    ({"architectures": ["Gemma2ForCausalLM"]}, {}),
]


def read(folder: Path, changes: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    (folder / "config.json").write_text(json.dumps({**config_of(QWEN), **(changes or {})}))
    config = from_flat({"model": str(folder), "skip_tokenizer_init": True, **settings})
    return config, read_checkpoint(config)


def told(early: EarlyKernels) -> frozenset[str]:
    select.select([early._told], [], [], 60)
    return early.keys()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device is one, and compiling takes no time."""
    monkeypatch.setattr(early_kernels, "_capability", lambda: (9, 0))
    monkeypatch.setattr(specializations, "leave", lambda compile_kernel: None)


@pytest.fixture
def before_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """As a program is that has not imported torch, on many processors; numbers of kernels that are begun."""
    begun = list[int]()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(early_kernels, "num_processors", lambda: 16)
    monkeypatch.setattr(early_kernels, "_running", [])
    monkeypatch.setattr(early_kernels, "EarlyKernels", lambda entries, mark: begun.append(len(entries)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return begun


@pytest.mark.parametrize(("name", "length"), [(QWEN, 4096), ("Llama 3.1 8B", 16384), ("Qwen3 30B-A3B", 16384)])
@pytest.mark.usefixtures("hopper")
def test_steps_launch_what_is_compiled_early(name: str, length: int, tmp_path: Path) -> None:
    """`make snapshots` writes the file anew when kernels or their launches have changed."""
    facts, met = rehearsed(config_of(name), length)
    early = EarlyKernels(wanted(facts), tmp_path / "cache" / "mark")
    assert told(early) == set(met)
    assert early.wait()
    assert (tmp_path / "cache" / "mark").exists()
    assert len(met) >= 10


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"enforce_eager": True, "max_num_seqs": 192}])
def test_steps_that_are_not_recorded_launch_the_same(settings: dict[str, Any]) -> None:
    _, recorded = rehearsed(config_of(QWEN), 2048)
    _, eager = rehearsed(config_of(QWEN), 2048, **settings)
    assert set(recorded) == set(eager)


@pytest.mark.usefixtures("hopper")
def test_it_takes_no_torch(tmp_path: Path) -> None:
    """What stands in for it beside the kernels changes no key."""
    config, checkpoint = read(tmp_path)
    entries = wanted(facts_of(config, checkpoint))
    script = (
        "import json, sys\nfrom pathlib import Path\n"
        "from frame.plugins.platforms.cuda.compile import compiler, early_kernels\n"
        "early_kernels._capability, compiler.leave = lambda: (9, 0), lambda compile_kernel: None\n"
        "early_kernels._compile(json.load(sys.stdin), Path(sys.argv[1]), 1)\n"
        "sys.exit(any(name.startswith('torch.') for name in sys.modules))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "mark")],
        input=json.dumps(entries), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == told(EarlyKernels(entries, tmp_path / "mark"))


@pytest.mark.usefixtures("hopper")
def test_nobody_compiles_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, checkpoint = read(tmp_path)
    early = EarlyKernels(wanted(facts_of(config, checkpoint)), tmp_path / "mark")
    keys = told(early)
    monkeypatch.setattr(early_kernels, "_running", [early])
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: (tmp_path / compile_kernel()).touch())
    monkeypatch.setattr(rehearsal, "hash_of", lambda key: min(keys) if key == "early" else key)

    def rehearse(platform: Any) -> None:
        for key in ("early", "late"):
            rehearsal._async_compile.active_mode.get().submit(key, partial(str, key), lambda kernel: None)

    assert CompilingAhead(AbsentCuda(make_setup("platform", config=config)), H200, rehearse).wait()
    assert (tmp_path / "late").exists()
    assert not (tmp_path / "early").exists()
    assert take() is None


def test_what_fails_is_told_and_what_is_late_or_stale_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, checkpoint = read(tmp_path)
    entries = wanted(facts_of(config, checkpoint))
    monkeypatch.setattr(specializations, "leave", lambda compile_kernel: 1 // 0)
    for capability, changes, any_keys, all_there in (
        ((9, 0), {}, True, False),
        ((8, 0), {}, False, True),
        ((9, 0), {"kernel": "frame.kernels.step:_gone"}, False, True),
        ((9, 0), {"arguments": {}}, False, True),
    ):
        monkeypatch.setattr(early_kernels, "_capability", lambda capability=capability: capability)
        early = EarlyKernels([{**entries[0], **changes}], tmp_path / "mark")
        assert bool(told(early)) == any_keys
        assert early.wait() == all_there
    monkeypatch.setattr(early_kernels, "_capability", lambda: time.sleep(600))
    early = EarlyKernels(entries, tmp_path / "late")
    assert not early.keys()
    assert early.wait()
    assert not (tmp_path / "late").exists()


def test_a_start_that_finds_them_compiles_nothing(tmp_path: Path, before_torch: list[int]) -> None:
    config, checkpoint = read(tmp_path)
    entries = wanted(facts_of(config, checkpoint))
    begin(config)
    assert before_torch == [len(entries)]
    early_kernels._running.clear()
    early_kernels._mark(entries).touch()
    begin(config)
    assert before_torch == [len(entries)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_processors", lambda: 7),
        ("sys", SimpleNamespace(modules={"torch": None})),
    ],
)
def test_without_time_or_room_nothing_begins(
    name: str, value: Any, tmp_path: Path, before_torch: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_kernels, name, value)
    begin(read(tmp_path)[0])
    assert before_torch == []


def test_a_worker_of_its_own_process_is_left_alone(tmp_path: Path, before_torch: list[int]) -> None:
    begin(read(tmp_path, executor="process")[0])
    assert before_torch == []


@pytest.mark.parametrize(("changes", "settings"), NOT_PLAIN)
def test_other_models_and_settings_have_no_entries(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    config, checkpoint = read(tmp_path, changes, **settings)
    assert wanted(facts_of(config, checkpoint)) == []


@pytest.mark.parametrize("fails", [False, True])
def test_what_triton_asks_the_driver_by_is_built_beside_them(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> None:
        (tmp_path / "built").touch()
        if fails:
            raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr("triton.backends.nvidia.driver.CudaUtils", build)
    monkeypatch.setattr(specializations, "leave", lambda compile_kernel: compile_kernel())
    specializations.compile_all([(tmp_path / "kernel").touch])
    assert (tmp_path / "built").exists()
    assert (tmp_path / "kernel").exists()


def test_what_a_start_that_came_to_nothing_has_begun_is_dropped(
    tmp_path: Path, before_torch: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = SimpleNamespace()
    monkeypatch.setattr(early_kernels, "_running", [left])
    begin(read(tmp_path, executor="process")[0])
    assert take() is None
    assert before_torch == []
