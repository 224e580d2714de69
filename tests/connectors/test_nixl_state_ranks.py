"""Running states between engines on one rank and on two, which divide heads and channels: the tokens are one's own."""

from __future__ import annotations

import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_prompts import Asked, open_engine

pytest.importorskip("nixl")

TWO = {"tensor_parallel_size": 2, "executor": "threads"}
SIZES = (90, 33, 64, 9)
#: Families whose layers keep states, and the tokens of which a prefix with a copy is a multiple.
FAMILIES = {
    "mamba2": 16, "mamba": 16, "qwen3-next": 8, "lfm2": 8, "kimi-linear": 8, "minimax": 8, "falcon-h1": 8,
    "olmo-hybrid": 8,
}  # fmt: skip
CASES = [name if name == "qwen3-next" else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES]


def prompts(shift=0):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of the tests")
    return path


def exchange(there, here, grain, shift):
    """Prompts go over, and are continued as the engine that gave them continues them itself."""
    for number, prompt in enumerate(prompts(shift)):
        name = f"{shift}-{number}"
        there.add(f"p{name}", prompt, {"do_remote_decode": True}, 1)
        there.finish(f"p{name}")
        here.add(f"d{name}", prompt, there.outputs[f"p{name}"][-1].kv_transfer)
        tokens = here.finish(f"d{name}", beside=there)
        assert here.num_cached(f"d{name}") == (len(prompt) - 1) // grain * grain
        assert tokens == there.alone(prompt)
    assert here.counter("failed_blocks") == 0
    assert there.rest() == here.rest() == 0


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("buffer", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["", "host buffer"])
def test_states_go_from_one_rank_to_two_and_back(family, buffer, secret, tmp_path):
    model = make_checkpoint(tmp_path, family)
    with open_engine(model, secret) as one, open_engine(model, secret, TWO, host_buffer=buffer) as two:
        there, here = Asked(one), Asked(two)
        exchange(there, here, FAMILIES[family], shift=0)
        exchange(here, there, FAMILIES[family], shift=50)


@pytest.mark.matrix
def test_states_go_from_stages_to_ranks(secret, tmp_path):
    model = make_checkpoint(tmp_path, "qwen3-next")
    stages = {"pipeline_parallel_size": 2, "executor": "threads"}
    with open_engine(model, secret, stages) as one, open_engine(model, secret, TWO) as two:
        exchange(Asked(one), Asked(two), 8, shift=0)
