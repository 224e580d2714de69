"""The lmcache connector under the whole engine: what one engine computed, others find at the server."""

from __future__ import annotations

import pytest

from frame import LoRARequest, SamplingParams
from frame.testing.checkpoints import make_checkpoint
from tests.adapters.cases import make_adapter
from tests.connectors.lmcache_server import FakeServer
from tests.connectors.test_offload_engine import BLOCK_SIZE, PROMPTS, SIZES, complete, llm_of

CHUNK = 16
UNITS = [size // CHUNK for size in SIZES]
FOUND = [min(size // CHUNK * CHUNK, (size - 1) // BLOCK_SIZE * BLOCK_SIZE) for size in SIZES]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
NOTHING = [0] * len(SIZES)


@pytest.fixture
def server():
    made = FakeServer(CHUNK, size=1 << 25)
    yield made
    assert not any(made.locks.values())
    made.close()


def settings(server, **others):
    plugin = {"lmcache": {"server": server.address, "lookup_seconds": 20}}
    return {"kv_offloading_size": 0, "kv_connector": "lmcache", "plugin": plugin, **others}


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("llama", {}),
        ("gemma2", {}),
        pytest.param("llama", {"tensor_parallel_size": 2, "executor": "process"}, marks=pytest.mark.matrix),
        pytest.param("gemma2", {"pipeline_parallel_size": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_prompts_of_another_engine_are_loaded(tmp_path, server, family, others):
    first = llm_of(tmp_path, family, **settings(server, **others))
    expected, cached = complete(first)
    first.close()
    assert cached == NOTHING
    ranks = 2 if others else 1
    assert len(server.objects) == ranks * sum(UNITS)
    second = llm_of(tmp_path, family, **settings(server, **others))
    assert complete(second) == (expected, FOUND)
    numbers = {one.name: one.value for one in second.get_metrics() if "connector_lmcache" in one.name}
    assert numbers["frame_kv_connector_lmcache_loaded_blocks"] == ranks * sum(FOUND) // BLOCK_SIZE, numbers
    second.close()
    if others:
        return
    for name in server.objects:
        server.damage(name)
    third = llm_of(tmp_path, family, **settings(server, **others))
    assert complete(third)[0] == expected
    third.close()


@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own
def test_adapters_stay_apart(tmp_path, server):
    pytest.importorskip("peft")
    make_checkpoint(tmp_path / "base", "llama")
    folders = [make_adapter(tmp_path / "base", tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    kinds = [None, *(LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1))]

    def told():
        llm = llm_of(tmp_path / "base", "llama", **settings(server, enable_lora=True, max_lora_rank=16))
        outputs = [llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False, lora_request=kind)[0] for kind in kinds]
        llm.close()
        return [(list(one.outputs[0].token_ids), one.num_cached_tokens) for one in outputs]

    first = told()
    assert [cached for _, cached in first] == [0, 0, 0]
    assert len({tuple(tokens) for tokens, _ in first}) == 3
    assert len({name[2] for name in server.objects}) == 3
    assert told() == [(tokens, FOUND[0]) for tokens, _ in first]
