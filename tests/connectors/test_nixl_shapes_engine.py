"""Real models on one rank and on two, with blocks of other sizes, exchange prompts: the tokens are one engine's."""

from __future__ import annotations

import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_prompts import Asked, Prefill, open_engine

pytest.importorskip("nixl")

TWO = {"tensor_parallel_size": 2, "executor": "threads"}
SIZES = (90, 33, 64, 9)
#: Family and what differs of it; "repeated" has fewer KV heads than ranks.
FAMILIES = {
    "llama": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "repeated": ("llama", {"num_key_value_heads": 1}),
    "latent": ("deepseek-v3", {}),
    "gemma2": ("gemma2", {}),
}
#: Two latent families more, and sliding windows with other block sizes.
MORE = {"deepseek-v32": ("deepseek-v32", {}), "gemma3": ("gemma3", {}), "qwen3": ("qwen3", {})}


CASES = ["llama", "latent", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("repeated", "gemma2", *MORE))]


def prompts(shift=0):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of the tests")
    return path


def make_model(folder, family):
    name, changes = {**FAMILIES, **MORE}[family]
    return make_checkpoint(folder, name, **changes)


def exchange(there, here, block_size, shift, shortest=8):
    """Prompts go over, and are continued as the engine that gave them continues them itself."""
    failed, loaded = here.counter("failed_blocks"), here.counter("loaded_blocks")
    for number, prompt in enumerate(prompts(shift)):
        name = f"{shift}-{number}"
        there.add(f"p{name}", prompt, {"do_remote_decode": True}, 1)
        there.finish(f"p{name}")
        here.add(f"d{name}", prompt, there.outputs[f"p{name}"][-1].kv_transfer)
        tokens = here.finish(f"d{name}", beside=there)
        travels = len(prompt) - 1 if len(prompt) > max(shortest, block_size) else 0
        assert here.num_cached(f"d{name}") == travels
        assert tokens == there.alone(prompt)
    assert here.counter("failed_blocks") == failed
    assert here.counter("loaded_blocks") > loaded
    assert there.rest() == here.rest() == 0


@pytest.mark.some(1)
@pytest.mark.parametrize("family", CASES)
def test_one_rank_feeds_two_and_two_feed_one(family, secret, tmp_path):
    model = make_model(tmp_path, family)
    with open_engine(model, secret) as one, open_engine(model, secret, TWO) as two:
        there, here = Asked(one), Asked(two)
        exchange(there, here, 8, shift=0)
        exchange(here, there, 8, shift=50)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family",
    ["gemma2", *(pytest.param(name, marks=pytest.mark.matrix) for name in (*FAMILIES, *MORE) if name != "gemma2")],
)
def test_blocks_of_other_sizes_on_other_ranks(family, secret, tmp_path):
    model = make_model(tmp_path, family)
    long, short = {"block_size": 32}, {**TWO, "block_size": 8}
    with open_engine(model, secret, long) as one, open_engine(model, secret, short) as two:
        there, here = Asked(one), Asked(two)
        exchange(there, here, 8, shift=0, shortest=32)
        exchange(here, there, 32, shift=50)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_pipeline_stages_and_tensor_ranks_exchange_prompts(family, secret, tmp_path):
    model = make_model(tmp_path, family)
    stages = {"pipeline_parallel_size": 2, "executor": "threads"}
    with open_engine(model, secret, stages) as one, open_engine(model, secret, {**TWO, "block_size": 16}) as two:
        there, here = Asked(one), Asked(two)
        exchange(there, here, 16, shift=0)
        exchange(here, there, 8, shift=50, shortest=16)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["gemma2", "latent"])
def test_prompts_travel_through_host_memory(family, secret, tmp_path):
    """Into one rank whose memory NIXL reaches and from it; the engine on two ranks has the buffer."""
    model = make_model(tmp_path, family)
    with open_engine(model, secret) as one, open_engine(model, secret, TWO, host_buffer=True) as two:
        there, here = Asked(one), Asked(two)
        exchange(there, here, 8, shift=0)
        exchange(here, there, 8, shift=50)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "latent"])
def test_caches_of_8_bit_floats_travel(family, secret, tmp_path):
    model, short = make_model(tmp_path, family), {"kv_cache_dtype": "fp8_e4m3"}
    with open_engine(model, secret, short) as one, open_engine(model, secret, {**TWO, **short}) as two:
        there, here = Asked(one), Asked(two)
        exchange(there, here, 8, shift=0)
        exchange(here, there, 8, shift=50)


@pytest.mark.matrix
def test_a_process_on_one_rank_feeds_processes_on_two(secret, tmp_path):
    model = make_model(tmp_path, "llama")
    there = Prefill(model, secret)
    try:
        with open_engine(model, secret, {**TWO, "executor": "process"}) as engine:
            there.wait_ready()
            here = Asked(engine)
            here.add("d", prompts()[0], there.prefill(prompts()[0]))
            tokens = here.finish("d")
            assert here.num_cached("d") == 89
            assert tokens == here.alone(prompts()[0])
            assert here.counter("failed_blocks") == 0
            assert there.usage() == here.rest() == 0
    finally:
        there.close()


@pytest.mark.parametrize(
    ("changes", "settings", "what"),
    [
        (
            {"num_hidden_layers": 2},
            {},
            "the number of layers that keep tokens: 3 at the prefill engine, 2 at the decode",
        ),
        pytest.param(
            {"seed": 1}, {}, "the model (a hash of config.json, weights and dtype): ", marks=pytest.mark.matrix
        ),
        (
            {},
            {"dtype": "bfloat16"},
            "cache (dtype or kv_cache_dtype), of layer model.layers.0.self_attn: float32 at",
        ),
        pytest.param({"num_key_value_heads": 4}, {}, "the number of KV heads, of layer", marks=pytest.mark.matrix),
    ],
    ids=["layers", "model", "dtype", "heads"],
)
def test_engines_that_do_not_fit_name_the_field_and_both_values(changes, settings, what, secret, tmp_path, caplog):
    model, other = make_checkpoint(tmp_path / "a", "llama"), make_checkpoint(tmp_path / "b", "llama", **changes)
    with open_engine(model, secret) as one, open_engine(other, secret, settings) as two:
        there, here = Asked(one), Asked(two)
        there.add("p", prompts()[0], {"do_remote_decode": True}, 1)
        there.finish("p")
        here.add("d", prompts()[0], there.outputs["p"][-1].kv_transfer)
        assert here.finish("d") == here.alone(prompts()[0])
        assert here.num_cached("d") == here.counter("loaded_blocks") == here.counter("failed_blocks") == 0
    assert "the engines differ in " in caplog.text
    assert what in caplog.text
