"""What requests may ask for, and what engines may do, over two ranks: the same outputs as on one."""

import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, every_kind, greedy, pooled, prompts, request, running, tokens_of
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from frame.testing.thread_executor import with_threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("features")
    return make_checkpoint(path, "llama", tokenizer=True)


#: Besides two ranks that divide each layer, these may also share the KV cache of a request.
SIZES = {
    "tensor": ["tensor_parallel_size"],
    "pipeline": ["pipeline_parallel_size"],
    "decode context": ["tensor_parallel_size", "decode_context_parallel_size"],
}


@pytest.fixture(params=SIZES)
def axis(request):
    return request.param


def both(folder, axis, serve, **settings):
    """What `serve(engine)` gives over one rank and over two of an axis."""
    found = []
    for size in (1, 2):
        values = {**SMALL, "model": str(folder), "num_threads": 1, **dict.fromkeys(SIZES[axis], size), **settings}
        values["executor"] = "inline" if size == 1 else "threads"
        with running(from_flat(values), with_threads(Registry.load())) as engine:
            found.append(serve(engine))
    return found


def served(engine):
    outputs = drain(engine, every_kind(prompts(400), 3))
    return {name: tokens_of(found) for name, found in outputs.items()}


@pytest.mark.some(2)
def test_every_kind_of_request(folder, axis):
    one, two = both(folder, axis, served)
    assert one == two


def test_every_kind_of_request_with_drafts(folder):
    """Penalties and bad words see the drafts before a row, of which each rank counts those of its part."""

    def serve(engine):
        outputs = drain(engine, every_kind([[7, 8, 9] * 8, [5, 6, 7, 8] * 6], 3))
        return {name: tokens_of(found) for name, found in outputs.items()}

    drafts = {"speculator": "ngram", "plugin": {"ngram": {"prompt_lookup_max": 2}}}
    one, two = both(folder, "tensor", serve, **drafts)
    assert one == two


def test_log_probabilities(folder, axis):
    def serve(engine):
        outputs = drain(engine, [request("a", prompts(400)[0], logprobs=3, prompt_logprobs=2)])["a"]
        return [row for output in outputs if output.logprobs is not None for row in np.ravel(output.logprobs.logprobs)]

    one, two = both(folder, axis, serve)
    assert len(one) == 12 * 4
    np.testing.assert_allclose(one, two, atol=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 12},  # requests are preempted
        {"max_num_batched_tokens": 16},  # prompts are computed in chunks
        {"speculator": "ngram", "plugin": {"ngram": {"prompt_lookup_max": 3}}},
        {"deterministic": True},
        {"async_scheduling": False},
    ],
    ids=["preemption", "chunks", "speculation", "deterministic", "synchronous"],
)
def test_ways_to_compute(folder, axis, settings):
    if axis == "pipeline" and "speculator" in settings:
        pytest.skip("refused, see test_layout.py")
    given = [*prompts(400), [7, 8, 9] * 12]
    one, two = both(folder, axis, lambda engine: greedy(engine, given, 20), **settings)
    assert one == two


def test_prefixes_are_found_again(folder, axis):
    def serve(engine):
        first = greedy(engine, prompts(400))
        again = greedy(engine, prompts(400))
        assert again == first
        return first, engine.stats().prefix_hits

    one, two = both(folder, axis, serve)
    assert one == two
    assert two[1] > 0


@pytest.mark.some(1)
def test_sleep_and_new_weights(folder, axis, tmp_path):
    make_checkpoint(tmp_path, "llama", seed=5)

    def serve(engine):
        before = greedy(engine, prompts(400))
        engine.call("sleep", {"keep": ("weights",)})
        engine.call("wake_up", {"tags": ("weights", "kv_cache")})
        assert greedy(engine, prompts(400)) == before
        engine.call("update_weights", {"model": str(tmp_path)})
        after = greedy(engine, prompts(400))
        assert after != before
        return before, after

    one, two = both(folder, axis, serve)
    assert one == two


@pytest.mark.parametrize(
    ("family", "axis"),
    [("bert-classes", "tensor"), ("qwen3", "tensor"), ("llama-classes", "tensor"), ("llama-classes", "pipeline")],
)
def test_pooled_rows(family, axis, tmp_path):
    make_pooling_checkpoint(tmp_path, family)
    one, two = both(tmp_path, axis, lambda engine: pooled(engine, prompts(60)), num_gpu_blocks_override=None)
    for first, second in zip(one, two, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)
