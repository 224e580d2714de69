"""Where the embeddings of a step lie: at the same addresses in each step, and nowhere where none may come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frame import LLM, SamplingParams
from frame.testing.checkpoints import make_checkpoint

ONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("embeds"), "llama")


def runner_of(llm: LLM) -> Any:
    (found,) = llm.llm_engine.collective_rpc(lambda worker: worker.runner)
    return found


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=40, max_num_seqs=4, **settings)


def test_they_take_no_memory_where_none_may_come(folder: Path) -> None:
    llm = make(folder)
    embeds = runner_of(llm).embeds
    assert embeds.memory() == {}
    assert embeds.given(8) is None
    assert not any("embeddings" in name for name in runner_of(llm).captured_inputs.addresses())
    llm.close()


def test_they_stay_where_they_are_and_are_forgotten_after_their_step(folder: Path) -> None:
    llm = make(folder, enable_prompt_embeds=True)
    runner = runner_of(llm)
    before = runner.captured_inputs.addresses()
    assert {"embeddings of prompts", "tokens that have one"} <= set(before)
    calls: list[int] = []
    given = runner.embeds.memory()["tokens that have one"]
    runner.model.register_forward_pre_hook(lambda *_: calls.append(int(given.sum())))
    llm.generate([{"prompt_embeds": torch.ones(5, 64)}, {"prompt_token_ids": [5, 6, 7]}], ONE, use_tqdm=False)
    assert calls == [5, 0]  # the prompts, then a token of each
    assert runner.captured_inputs.addresses() == before
    llm.close()
