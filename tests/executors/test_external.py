"""The external executor under a real torchrun: every process runs the same engine and gets the same tokens."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frame import LLM, SamplingParams
from frame.interfaces import Mesh
from frame.plugins.executors.external import VARIABLES, why_not
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL
from tests.free_ports import free_ports

SCRIPT = Path(__file__).with_name("external_run.py")
TOLD = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama")
    return folder


def torchrun(folder, out, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), str(out), *flags], capture_output=True, text=True, timeout=240, check=False
    )
    files = [out / "0.json", out / "1.json"]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", [(), pytest.param(("stages",), marks=pytest.mark.matrix)], ids=["tensor", "stages"])
def test_every_rank_gets_the_tokens_of_one_rank(folder, tmp_path, mode):
    first, second = torchrun(folder, tmp_path, *mode)
    with LLM(model=str(folder), skip_tokenizer_init=True, num_threads=1, seed=1, **SMALL) as llm:
        prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8 * (i + 1)]} for i in range(5)]
        params = [SamplingParams(max_tokens=12, temperature=0.0 if i % 2 else 1.0, ignore_eos=True) for i in range(5)]
        alone = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    assert first["tokens"] == second["tokens"] == alone
    assert first["ranks"] == second["ranks"] == [0, 1]


@pytest.mark.matrix
def test_processes_that_do_different_things_are_told_so(folder, tmp_path):
    for rank in torchrun(folder, tmp_path, "diverge"):
        assert "ranks 1 planned another step than rank 0" in rank["tokens"][0]


@pytest.mark.matrix
def test_a_process_that_is_killed_ends_the_others_with_one_sentence(folder, tmp_path):
    """Under another launcher, which leaves the others alone; rank 0 then serves the store."""
    command = [sys.executable, str(SCRIPT), str(folder), str(tmp_path), "dies"]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert ranks[1].wait(120) == -9
    began = time.monotonic()
    assert ranks[0].wait(60) == 0
    assert time.monotonic() - began < 30
    (said,) = json.loads((tmp_path / "0.json").read_text())["tokens"]
    assert "rank 0 waits for the engines of other processes in vain: " in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"WORLD_SIZE": "3"}, "2 workers need as many processes, and WORLD_SIZE is 3"),
        ({"RANK": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a whole number, not 'x'"),
    ],
)
def test_what_the_launcher_tells_must_fit(changes, reason):
    assert why_not(Mesh(tensor=2), {**TOLD, **changes}) == reason


@pytest.mark.parametrize("name", VARIABLES)
def test_a_missing_variable_is_named(name):
    reason = why_not(Mesh(tensor=2), {key: value for key, value in TOLD.items() if key != name})
    assert reason is not None
    assert reason.endswith(f"{name} is not set")
