"""vLLM's module paths lead to frame's names; a name that frame lacks is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import frame
from frame.vllm_names.modules import MODULES

NAMES = [(place, name, target) for place, names in MODULES.items() for name, target in names.items()]


@pytest.mark.parametrize(("place", "name", "target"), NAMES, ids=[f"{place}.{name}" for place, name, _ in NAMES])
def test_every_name_of_the_table_is_found(place: str, name: str, target: str) -> None:
    module = import_module(f"frame.{place}")
    home, colon, attribute = target.partition(":")
    if colon and " " not in home:
        assert getattr(module, name) == getattr(import_module(home), attribute)
        return
    with pytest.raises(ImportError) as caught:
        getattr(module, name)
    assert target in str(caught.value)


def test_an_unknown_name_and_an_unknown_module_are_import_errors() -> None:
    with pytest.raises(ImportError, match=r"frame\.sampling_params has no 'Nothing' here; it has: BeamSearchParams"):
        exec("from frame.sampling_params import Nothing")  # noqa: S102
    with pytest.raises(ModuleNotFoundError):
        import_module("frame.v1.nothing")


def test_modules_of_frame_itself_are_found_first_and_without_torch() -> None:
    assert frame.interfaces.__file__ is not None
    code = "import sys, frame.sampling_params, frame.utils, frame.v1.engine.async_llm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_configs_are_mappings_of_what_was_given() -> None:
    from frame.config import KVTransferConfig  # type: ignore[import-not-found]

    given = KVTransferConfig(kv_connector="disk", kv_role="kv_both", kv_rank=None)
    arguments = frame.EngineArgs(model="", kv_transfer_config=given)
    assert arguments.create_engine_config().transfer.kv_connector == "disk"
