"""An engine gives the same tokens whichever kernel serves few decodes; on a GPU from graphs, and interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.kernels import decode_few
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import greedy, prompts, running

pytestmark = pytest.mark.gpu

SIZES = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "dtype": "float16"}


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss"])
def test_tokens_are_equal(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without windows, with them, and with both kinds of layers and sinks; steps have one to five rows."""
    folder = make_checkpoint(tmp_path, family)
    rows: list[int] = []
    attend = decode_few.decode_attention

    def counted(query: Any, *given: Any, **how: Any) -> Any:
        rows.append(len(query))
        return attend(query, *given, **how)

    monkeypatch.setattr(decode_few, "decode_attention", counted)
    found, used = [], []
    for few in (True, False):
        plugin = {"triton": {"few_decodes": few}}
        config = from_flat({"model": str(folder), "attention_backend": "triton", "plugin": plugin, **SIZES})
        with running(config, Registry.load()) as engine:
            found.append([greedy(engine, prompts(512, lengths)) for lengths in ((30,), (3, 17, 40, 1, 90))])
        used.append(set(rows))  # a replayed step calls nothing, but its capture did
        rows.clear()
    assert 1 in used[0]
    assert max(used[0]) > 4
    assert used[1] == set()
    assert found[0] == found[1]
