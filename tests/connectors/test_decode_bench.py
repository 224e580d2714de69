"""The decode-bench connector: prompts are not computed, and everything else is as always."""

from __future__ import annotations

import pytest
import torch

from frame import LLM, SamplingParams
from frame.core.plugin_host.registry import PluginError
from frame.interfaces import BlockFormat, CacheView, RequestView
from frame.plugins.connectors.decode_bench.messages import DecodeBenchOptions
from frame.plugins.connectors.decode_bench.scheduler import DecodeBenchScheduler
from frame.plugins.connectors.decode_bench.worker import DecodeBenchWorker
from frame.testing import make_setup
from frame.testing.checkpoints import make_checkpoint
from frame.testing.connector_suite import empty_plan
from frame.testing.fake_cache import make_layout

BLOCK_SIZE = 8


def scheduler(layout=None, **setup):
    return DecodeBenchScheduler(
        make_setup("connector", layout=layout or make_layout(), **setup), DecodeBenchOptions.model_validate({})
    )


def view(length=22, name="a"):
    return RequestView(request_id=name, token_ids=range(length), block_hashes=[], prompt_len=length)


def test_a_prompt_is_claimed_once_and_its_last_token_computed():
    side = scheduler()
    assert side.matched_tokens(view(), 0) == (20, False)
    assert side.matched_tokens(view(), 8) == (12, False)
    assert side.matched_tokens(view(20), 0) == (16, False)
    assert side.matched_tokens(view(3), 0) == (0, False)
    side.allocated(view(), [[7, 8, 9, 10, 11]], 12)
    assert side.matched_tokens(view(), 0) == (0, False), "it was preempted, and is computed"
    assert side.matched_tokens(view(name="b"), 0) == (20, False)
    assert side.build_message(empty_plan(0))
    assert not side.build_message(empty_plan(1))
    side.finished(view(), [])
    assert side.matched_tokens(view(), 0) == (20, False)


def test_an_engine_that_only_saves_claims_nothing():
    assert scheduler(role="producer").matched_tokens(view(), 0) == (0, False)


def test_layers_that_keep_states_are_refused():
    with pytest.raises(ValueError, match=r"^the decode-bench connector cannot make up what layer \S+ keeps$"):
        scheduler(make_layout(states=4, checkpoints=8))


def filled(dtype, **options):
    """The cache of a layer, of which blocks 3 and 4 were to be filled."""
    layout = make_layout()
    side = scheduler(layout)
    side.allocated(view(), [[1, 2, 3, 4]], 8)
    worker = DecodeBenchWorker(
        make_setup("connector", part="worker", layout=layout), DecodeBenchOptions.model_validate(options)
    )
    rows = torch.zeros(6, 64, dtype=torch.uint8)
    worker.register({"layer": CacheView(rows, BlockFormat((64 // dtype.itemsize,), (0,), dtype), 0)})
    worker.begin_step(side.build_message(empty_plan(0)))
    assert worker.end_step([]).counters == {"decode_bench_filled_blocks": 2}
    assert worker.end_step([]).counters == {}
    assert not rows[[0, 1, 2, 5]].any()
    return rows[3:5].view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_blocks_are_filled_with_numbers_that_are_finite_and_not_zero(dtype):
    values = filled(dtype).float()
    assert values.isfinite().all()
    assert values.all()
    assert values.unique().numel() == 1


def test_numbers_may_be_drawn():
    values = filled(torch.float32, fill_mean=2.0, fill_std=0.5)
    assert values.unique().numel() > 20
    assert 1.5 < values.mean() < 2.5


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        pytest.param("gemma2", {"tensor_parallel_size": 2}, marks=pytest.mark.matrix),
        ("llama", {"kv_cache_dtype": "fp8_e4m3"}),
    ],
    ids=str,
)
def test_a_real_model_decodes_without_computing_prompts(tmp_path, family, settings):
    llm = LLM(
        model=str(make_checkpoint(tmp_path, family)),
        block_size=BLOCK_SIZE,
        max_model_len=160,
        max_num_batched_tokens=128,
        skip_tokenizer_init=True,
        num_threads=1,
        disable_log_stats=False,
        kv_transfer_config={"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
        **settings,
    )
    prompts = [{"prompt_token_ids": [3 + (7 * i * (j + 1)) % 400 for i in range(90 + j)]} for j in range(3)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [10] * 3
    assert [one.num_cached_tokens for one in outputs] == [88] * 3
    metrics = {one.name: one.value for one in llm.get_metrics() if "connector" in one.name}
    ranks = settings.get("tensor_parallel_size", 1)
    assert metrics["frame_kv_connector_decode_bench_filled_blocks"] == 33 * ranks
    llm.close()


def test_options_that_are_wrong_are_one_sentence(tmp_path):
    with pytest.raises(PluginError, match=r"^option fill_std of plugin 'decode-bench' must be .* 0, got -1"):
        LLM(
            str(make_checkpoint(tmp_path, "llama")),
            kv_connector="decode-bench",
            plugin={"decode-bench": {"fill_std": -1}},
            skip_tokenizer_init=True,
        )
