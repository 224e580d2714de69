"""Memory of the device that a KV connector takes is counted before the KV cache is divided into blocks."""

import pytest

from frame import LLM
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.plugins.connectors.offload import options as offload_options
from frame.plugins.connectors.offload.options import OffloadOptions, buffer_rows
from frame.plugins.connectors.push import options as push_options
from frame.plugins.platforms.cpu import HostMemory
from frame.testing.checkpoints import make_checkpoint
from frame.transfers.device_bytes import device_bytes

MIB = 1 << 20
SIZES = {"device_bytes": 64 * MIB}
#: For places where senders show that they write, and for the allocator.
MOST_BESIDE = 8 * MIB


@pytest.mark.parametrize(
    ("settings", "options", "mib"),
    [
        ({}, SIZES, 64),
        ({"kv_role": "producer"}, SIZES, 0),
        ({"kv_role": "consumer"}, SIZES, 64),
        ({}, {}, 1024),
        ({}, {**SIZES, "direct": False}, 0),
        ({}, {**SIZES, "secret_file": None}, 0),
    ],
)
def test_push(tmp_path, settings, options, mib):
    secret = tmp_path / "secret"
    secret.write_text("nobody can guess me")
    options = {"secret_file": str(secret), **options}
    config = from_flat({"kv_connector": "push", "plugin": {"push": options}, **settings})
    assert 0 <= device_bytes(config, Registry.load(), "cuda") - mib * MIB <= bool(mib) * MOST_BESIDE
    assert device_bytes(config, Registry.load(), "cpu") == 0


def test_connectors_that_another_one_holds(tmp_path):
    disk = {"kv_connector": "disk", "options": {"folder": str(tmp_path)}}
    push = {"kv_connector": "push", "kv_role": "kv_consumer", "options": {"secret_file": "there", **SIZES}}
    config = from_flat({"kv_connector": "multi", "plugin": {"multi": {"connectors": [disk, push, push]}}})
    assert 0 <= device_bytes(config, Registry.load(), "cuda") - 128 * MIB <= MOST_BESIDE


@pytest.mark.parametrize(
    ("options", "mib"), [({"size": 0.5}, 64), ({"size": 0.5, "shared": True}, 96), ({"disk_folder": "there"}, 64)]
)
@pytest.mark.parametrize("role", ["both", "producer", "consumer"])
def test_offload(options, mib, role):
    """A buffer for each direction, and what checksums of shared memory take."""
    config = from_flat({"kv_connector": "offload", "kv_role": role, "plugin": {"offload": options}})
    assert device_bytes(config, Registry.load(), "cuda") == mib * MIB
    assert device_bytes(config, Registry.load(), "cpu") == 0


def test_the_buffers_of_offload_are_no_larger():
    for row_bytes in (1 << 10, 3 << 20, 20 << 20):
        assert 2 * buffer_rows(row_bytes) * row_bytes <= offload_options.device_bytes(OffloadOptions(), "both", "cuda")


@pytest.mark.parametrize("settings", [{}, {"kv_connector": "disk"}, {"kv_connector": "mooncake"}])
def test_others_take_none(tmp_path, settings):
    config = from_flat({**settings, "plugin": {"disk": {"folder": str(tmp_path)}}})
    assert device_bytes(config, Registry.load(), "cuda") == 0


def test_the_cache_gets_as_much_less(tmp_path, monkeypatch):
    folder, taken = str(make_checkpoint(tmp_path, "llama")), []
    monkeypatch.setattr(HostMemory, "kv_bytes", lambda *given: 4 * MIB)
    monkeypatch.setattr(push_options, "device_bytes", lambda *given: taken.append(given) or MIB)

    def num_blocks(**settings):
        with LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, **settings) as llm:
            return llm.llm_engine.core.info.num_blocks

    without = num_blocks()
    assert without > 40
    assert num_blocks(kv_connector="push") == pytest.approx(0.75 * without, abs=2)
    ((_, role, device_type),) = taken
    assert (role, device_type) == ("both", "cpu")
    assert num_blocks(kv_connector="push", kv_cache_memory_bytes=4 * MIB) == without, "the user said how much it has"
