"""Requests over one prompt give the same tokens whether they share its keys or not; on a GPU from graphs, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.testing.engines import drain, prompts, request, running, tokens_of
from frame.testing.tiny import write_tiny

pytestmark = pytest.mark.gpu


def test_an_engine_that_shares_prefixes_gives_the_same_tokens(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM")
    prompt, other = prompts(512, (66, 3))
    asked = [request("first", [*prompt, 5], 4), request("second", [*prompt, 6], 3), request("other", other, 3)]
    sizes = {"num_gpu_blocks_override": 60, "max_model_len": 128, "max_num_seqs": 4, "gpu_memory_utilization": 0.2}
    found, shared = [], []
    for backend, tokens in (("torch", 0), ("triton", 1)):
        given = {"dtype": "float32", "attention_backend": backend, "shared_prefix_min_tokens": tokens}
        with running(from_flat({"model": str(tmp_path), **sizes, **given}), Registry.load()) as engine:
            plans = []
            execute = engine.executor.execute
            engine.executor.execute = lambda plan, execute=execute, plans=plans: (plans.append(plan), execute(plan))[1]
            outputs = drain(engine, asked)
        found.append({name: tokens_of(output) for name, output in outputs.items()})
        shared.append([group.num_tokens for plan in plans for group in plan.prefixes])
    assert found[0] == found[1]
    assert shared[0] == []
    assert set(shared[1]) == {64}
