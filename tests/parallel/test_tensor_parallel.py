"""Engines over several tensor ranks give the tokens of one rank."""

import gc

import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, mixed_requests, prompts, running
from frame.testing.executor_suite import children
from frame.testing.families import FAMILIES, experts
from frame.testing.thread_executor import with_threads

#: One family for each trait that sharding must know.
TRAITS = {
    "llama": "plain", "llama-tied": "tied head", "qwen3-moe": "experts", "gpt2": "transposed", "gemma2": "norms",
    "olmo2": "norms over all heads", "phi3": "fused halves",
}  # fmt: skip


def tokens(folder, size, serve=greedy, executor="threads", **settings):
    values = {**SMALL, "model": str(folder), "num_threads": 1, **settings}
    if size > 1:
        values |= {"tensor_parallel_size": size, "executor": executor}
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        return serve(engine, prompts(400))


@pytest.mark.parametrize("family", TRAITS, ids=TRAITS.values())
def test_two_ranks_give_the_tokens_of_one(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2) == tokens(tmp_path, 1)


@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_key_heads_that_several_ranks_hold(family, tmp_path):
    """One key/value head on both of two ranks: its squares count once, and both read it from a fused tensor."""
    make_checkpoint(tmp_path, family, num_key_value_heads=1)
    assert tokens(tmp_path, 2) == tokens(tmp_path, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["olmo2", "phi3"])
def test_fewer_key_heads_than_four_ranks(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 4) == tokens(tmp_path, 1)


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.matrix)])
def test_whole_experts_on_each_rank(size, tmp_path):
    """Four experts over three ranks: the last one has none. Heads divide by all sizes."""
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 48}
    make_checkpoint(tmp_path, "qwen3-moe", num_experts=4, **sizes)
    assert tokens(tmp_path, size, enable_expert_parallel=True) == tokens(tmp_path, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TRAITS])
def test_every_family_over_two_ranks(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2) == tokens(tmp_path, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("family", experts.ROWS)
def test_every_family_with_whole_experts_on_each_rank(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2, enable_expert_parallel=True) == tokens(tmp_path, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3-moe"])
def test_four_ranks_give_the_tokens_of_one(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 4, mixed_requests) == tokens(tmp_path, 1, mixed_requests)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama-tied", 2),
        pytest.param("llama", 4, marks=pytest.mark.matrix),
        pytest.param("gpt2", 2, marks=pytest.mark.matrix),
        pytest.param("gemma2", 4, marks=pytest.mark.matrix),
    ],
)
def test_a_vocabulary_that_does_not_divide(family, size, tmp_path):
    """The last rank has fewer tokens than the others; greedy and random draws."""
    make_checkpoint(tmp_path, family, vocab_size=509)
    assert tokens(tmp_path, size, mixed_requests) == tokens(tmp_path, 1, mixed_requests)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}])
def test_batches_that_change_with_each_step(settings, tmp_path):
    make_checkpoint(tmp_path, "llama")
    assert tokens(tmp_path, 2, mixed_requests, **settings) == tokens(tmp_path, 1, mixed_requests, **settings)


@pytest.mark.matrix
def test_norms_over_all_heads_do_not_depend_on_the_batch(tmp_path):
    make_checkpoint(tmp_path, "olmo2")
    given = {"deterministic": True}
    assert tokens(tmp_path, 2, mixed_requests, **given) == tokens(tmp_path, 2, mixed_requests, max_num_seqs=1, **given)


def test_workers_in_processes_of_their_own(tmp_path):
    make_checkpoint(tmp_path, "llama")
    assert tokens(tmp_path, 2, executor="auto") == tokens(tmp_path, 1)


# the collector may reach sockets and processes before the engine that closes them
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_that_nobody_refers_to_ends_its_workers(tmp_path):
    from frame import LLM

    make_checkpoint(tmp_path, "llama")
    before = children()
    llm = LLM(model=str(tmp_path), skip_tokenizer_init=True, tensor_parallel_size=2, num_threads=1, **SMALL)
    assert len(children() - before) == 2
    del llm
    gc.collect()
    assert not children() - before
