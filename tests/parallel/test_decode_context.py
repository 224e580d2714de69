"""Ranks that share the KV cache of a request give the tokens of one rank, and have room for more of them."""

import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import mesh_of
from frame.layout.check import check_layout
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, mixed_requests, prompts, running
from frame.testing.families import FAMILIES
from frame.testing.thread_executor import with_threads
from tests.family_cases import UNSHARED

#: Few key/value heads, which ranks would each repeat, and as many as ranks, which then hold each other's.
FEWER, AS_MANY = {"num_attention_heads": 4, "num_key_value_heads": 1}, {}


def tokens(folder, size=1, shared=1, serve=greedy, **settings):
    values = {**SMALL, "model": str(folder), "num_threads": 1, **settings}
    if size > 1:
        values |= {"tensor_parallel_size": size, "decode_context_parallel_size": shared, "executor": "threads"}
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        return serve(engine, prompts(400))


@pytest.mark.some(3)
@pytest.mark.parametrize("heads", [FEWER, AS_MANY], ids=["one KV head", "two KV heads"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_two_ranks_that_share_a_context_give_the_tokens_of_one(family, heads, tmp_path):
    make_checkpoint(tmp_path, family, **heads)
    assert tokens(tmp_path, 2, 2) == tokens(tmp_path)


@pytest.mark.parametrize("shared", [2, 4])
def test_four_ranks_of_which_some_share(shared, tmp_path):
    """Two key/value heads, each on two of four ranks."""
    make_checkpoint(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=2)
    assert tokens(tmp_path, 4, shared) == tokens(tmp_path)


@pytest.mark.parametrize("settings", [{"block_size": 6}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}])
def test_batches_that_change_with_each_step(settings, tmp_path):
    make_checkpoint(tmp_path, "mistral", **FEWER)
    one, two = (tokens(tmp_path, size, size, mixed_requests, **settings) for size in (1, 2))
    assert one == two


@pytest.mark.parametrize(("heads", "gain"), [(FEWER, 2), (AS_MANY, 1)], ids=["one KV head", "two KV heads"])
def test_memory_holds_twice_the_tokens_where_ranks_would_repeat_heads(heads, gain, tmp_path):
    make_checkpoint(tmp_path, "llama", **heads)

    def blocks(engine, given):
        del given
        return engine.info.num_blocks, engine.info.block_size

    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    (alone, size), (shared, shared_size) = (tokens(tmp_path, 2, ranks, blocks, **settings) for ranks in (1, 2))
    assert size == shared_size
    assert shared // gain == alone  # blocks that fit, rounded down


@pytest.mark.parametrize(
    ("heads", "settings", "said"),
    [
        ({}, {}, "decode_context_parallel_size 3 does not divide tensor_parallel_size 4; sizes that work: 1, 2, 4"),
        (
            {},
            {"decode_context_parallel_size": 2, "block_size": 3},
            "decode_context_parallel_size 2: blocks of 3 tokens",
        ),
        ({}, {"decode_context_parallel_size": 2, "kv_connector": "peer"}, "2: KV connector 'peer' moves whole tokens"),
        (
            {"sliding_window": 22},
            {"decode_context_parallel_size": 4},
            "decode_context_parallel_size 4: the window of model.layers.0.self_attn, 22 tokens, cannot be shared by 4 "
            "devices; sizes that work: 1, 2",
        ),
    ],
    ids=["size", "blocks", "connector", "window"],
)
def test_what_cannot_be_shared_is_refused_with_the_sizes_that_work(heads, settings, said, tmp_path):
    make_checkpoint(tmp_path, "mistral", num_attention_heads=4, num_key_value_heads=2, **heads)
    values = {"model": str(tmp_path), "tensor_parallel_size": 4, "decode_context_parallel_size": 3, **settings}
    config = from_flat(values)
    with pytest.raises(ConfigError) as raised:
        check_layout(config, mesh_of(config), read_checkpoint(config), Registry.load())
    assert said in str(raised.value)


@pytest.mark.matrix
@pytest.mark.few_families
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNSHARED])
def test_every_family_over_two_ranks_that_share_contexts(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2, 2) == tokens(tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [{"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}, {"kv_cache_dtype": "fp8_e4m3"}],
    ids=lambda settings: next(iter(settings)),
)
def test_shared_contexts_beside_other_ways_to_divide_or_keep(settings, tmp_path):
    make_checkpoint(tmp_path, "qwen3-moe")
    alone = {name: value for name, value in settings.items() if name == "kv_cache_dtype"}
    assert tokens(tmp_path, 2, 2, **settings) == tokens(tmp_path, **alone)
