"""Ranks that divide the tokens of each step give the tokens of one rank, and have room for more of them."""

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
from tests.family_cases import UNDIVIDED


def tokens(folder, ranks=1, serve=greedy, **settings):
    values = {**SMALL, "model": str(folder), "num_threads": 1, **settings}
    if ranks > 1:
        values |= {"prefill_context_parallel_size": ranks, "executor": "threads"}
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        return serve(engine, prompts(400))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_two_ranks_that_divide_tokens_give_those_of_one(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2) == tokens(tmp_path)


@pytest.mark.matrix
@pytest.mark.few_families
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNDIVIDED])
def test_every_family_over_two_ranks_that_divide_tokens(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2, mixed_requests) == tokens(tmp_path, 1, mixed_requests)


@pytest.mark.parametrize("settings", [{"block_size": 6}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}])
def test_batches_that_change_with_each_step(settings, tmp_path):
    make_checkpoint(tmp_path, "mistral")
    assert tokens(tmp_path, 2, mixed_requests, **settings) == tokens(tmp_path, 1, mixed_requests, **settings)


def test_a_prompt_in_chunks_and_again_from_the_prefix_cache(tmp_path):
    """Chunks of 15 tokens, which three ranks divide evenly and two do not."""
    make_checkpoint(tmp_path, "llama")

    def twice(engine, given):
        return greedy(engine, given), greedy(engine, given)

    settings = {"max_num_batched_tokens": 15, "max_num_seqs": 4, "block_size": 6}
    alone = tokens(tmp_path, 1, twice, **settings)
    assert tokens(tmp_path, 2, twice, **settings) == alone
    assert tokens(tmp_path, 3, twice, **settings) == alone


def test_ranks_that_also_divide_weights(tmp_path):
    make_checkpoint(tmp_path, "llama")
    assert tokens(tmp_path, 2, tensor_parallel_size=2) == tokens(tmp_path)


def test_memory_holds_twice_the_tokens(tmp_path):
    make_checkpoint(tmp_path, "llama")

    def blocks(engine, given):
        del given
        return engine.info.num_blocks * engine.info.block_size

    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    alone, shared = (tokens(tmp_path, ranks, blocks, **settings) for ranks in (1, 2))
    assert shared == 2 * alone


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 2}, "does not go with pipeline_parallel_size 2 yet"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "does not go with decode_context_parallel_size 2 yet",
        ),
        ({"enable_expert_parallel": True}, "does not go with enable_expert_parallel yet"),
        ({"speculator": "ngram", "num_speculative_tokens": 2}, "does not go with speculator 'ngram' yet"),
        ({"block_size": 3}, ": blocks of 3 tokens cannot be shared"),
        ({"kv_connector": "peer"}, ": KV connector 'peer' moves whole tokens"),
    ],
    ids=["pipeline", "decode context", "experts", "speculator", "blocks", "connector"],
)
def test_what_does_not_go_with_divided_tokens_is_refused(settings, said, tmp_path):
    make_checkpoint(tmp_path, "qwen3-moe")
    config = from_flat({"model": str(tmp_path), "prefill_context_parallel_size": 2, **settings})
    with pytest.raises(ConfigError) as raised:
        check_layout(config, mesh_of(config), read_checkpoint(config), Registry.load())
    assert f"prefill_context_parallel_size 2{said if said[0] == ':' else ' ' + said}" in str(raised.value)


def test_windows_that_ranks_cannot_share_are_refused_with_the_sizes_that_work(tmp_path):
    make_checkpoint(tmp_path, "mistral", sliding_window=9)
    config = from_flat({"model": str(tmp_path), "prefill_context_parallel_size": 2})
    with pytest.raises(ConfigError) as raised:
        check_layout(config, mesh_of(config), read_checkpoint(config), Registry.load())
    assert str(raised.value).startswith(
        "prefill_context_parallel_size 2: the window of model.layers.0.self_attn, 9 tokens, cannot be shared by 2 "
        "devices; sizes that work: 1, 3, 9"
    )
