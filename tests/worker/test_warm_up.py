"""Steps before the first request: they reach every feature, and leave nothing that a request could see."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from frame import LLM, SamplingParams
from frame.core.interfaces.platform_steps import Kernels, Steps
from frame.core.worker.start import warm_up
from frame.core.worker.step.runner import Runner
from frame.interfaces import AttentionSpec, BackendSetup
from frame.ops import Ops
from frame.plugins.platforms.cpu import CpuPlatform
from frame.testing.checkpoints import make_checkpoint
from frame.testing.encoder_decoders import make_encoder_decoder
from frame.testing.pooling_checkpoints import make_pooling_checkpoint


class RunsTwice(Kernels):
    """Runs steps of every kind, as a device does that compiles them first."""

    def __init__(self, platform=None, left=None):
        self.platform, self.left = platform, left

    def prepare(self, run):
        run()
        run()
        if self.platform is not None:
            self.left.append(self.platform.ops().invariant)


PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(40))}]
SIZES = [{}, {"max_num_seqs": 2}, {"max_num_seqs": 1, "max_num_batched_tokens": 8}, {"max_model_len": 5}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("warm-up"), "gemma2"))


def answers(folder, settings):
    engine = LLM(folder, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, **settings)
    prompts = [{"prompt_token_ids": prompt["prompt_token_ids"][:3]} for prompt in PROMPTS] if settings else PROMPTS
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("settings", SIZES, ids=str)
def test_requests_see_nothing_of_it(settings, folder, monkeypatch):
    want = answers(folder, settings)
    steps = warm_steps(monkeypatch)
    assert answers(folder, settings) == want
    warmed = [plan for plan in steps if any(new.request_id.startswith("warm-up") for new in plan.added)]
    assert warmed or settings.get("max_model_len") == 5


@pytest.mark.parametrize(("settings", "wanted"), [({}, {False, True}), ({"deterministic": True}, {False})], ids=str)
def test_deterministic_steps_are_warmed_where_single_requests_may_ask_for_them(settings, wanted, folder, monkeypatch):
    """In an engine that is deterministic anyway, every step is."""
    steps, left = warm_steps(monkeypatch), []
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(kernels=RunsTwice(self, left)))
    LLM(folder, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, **settings).close()
    assert {plan.deterministic for plan in steps} == wanted
    assert left == [bool(settings)], "what runs next would run with the other numerics"


@pytest.mark.parametrize("family", ["bert", "xlm-roberta-reranker", "qwen3", "qwen3-classes"])
def test_pooling_engines_are_warmed_with_every_kind_of_row(family, tmp_path, monkeypatch):
    checkpoint = str(make_pooling_checkpoint(tmp_path, family))
    want = rows_of(checkpoint)
    steps = warm_steps(monkeypatch)
    assert rows_of(checkpoint) == want
    kinds = {new.pooling.per_token for plan in steps for new in plan.added if new.request_id.startswith("warm-up")}
    assert kinds == {False, True}


def test_encoders_before_decoders_are_warmed_with_prompts_of_their_own(tmp_path, monkeypatch):
    folder = str(make_encoder_decoder(tmp_path, "bart"))
    want = answers(folder, {})
    steps = warm_steps(monkeypatch)
    assert answers(folder, {}) == want
    warmed = [new for plan in steps for new in plan.added if new.request_id.startswith("warm-up")]
    assert warmed
    assert all(len(new.encoder_ids) == len(new.token_ids) for new in warmed)


def rows_of(checkpoint):
    engine = LLM(checkpoint, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, dtype="float32")
    outputs = engine.encode(PROMPTS, use_tqdm=False)
    engine.close()
    return [output.outputs.data.tolist() for output in outputs]


def warm_steps(monkeypatch):
    """The plans of every step that runs, on a platform that prepares kernels."""
    steps, execute = [], Runner.execute
    monkeypatch.setattr(Runner, "execute", lambda self, plan: (steps.append(plan), execute(self, plan))[1])
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(kernels=RunsTwice()))
    return steps


@pytest.mark.parametrize("max_model_len", [40, 256, 4096])
def test_prompts_of_a_thorough_warm_up_have_each_power_of_two_of_tokens(max_model_len):
    """Exactly, since launch code chooses kernels by it."""
    made = []

    def make(slot, feature, length):
        made.append(length)
        return

    plans = [plan for plan in warm_up._sizes(make, False, 512, 1024, max_model_len) if len(plan.slots)]
    assert [int(plan.num_scheduled.sum()) for plan in plans] == [2**power for power in range(1, 11)]
    assert sum(made) == 2**11 - 2
    assert max(made) <= max_model_len - 4


@pytest.mark.parametrize("most", [8, 16, 32, 64, 200])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16, 32])
def test_a_thorough_warm_up_meets_what_attention_launches_for_any_number_of_rows(kv_heads, most):
    triton = pytest.importorskip("frame.plugins.attention.triton")
    bf16 = torch.bfloat16
    backend = triton.TritonAttention(BackendSetup(AttentionSpec(64, kv_heads, 128, 1.0, bf16, bf16, 16, "cpu"), Ops()))

    def launches(rows, length):
        launch, ordered = backend.decode_launch(rows, length), backend._rule(rows).longest_first
        return {("tiles", launch.splits > 1, launch.block_n), ("ordered", ordered)}

    for multiprocessors in (78, 108, 114, 132, 148):
        backend._multiprocessors = multiprocessors
        met = set()
        for shape in warm_up._more_decodes(most, 8192):
            assert shape.padded_tokens == shape.padded_rows <= most
            met |= launches(shape.padded_rows, shape.max_seq_len or 8192)
        for rows in range(1, most + 1):
            for length in (1, 100, 300, 700, 1500, 3000, 8192):
                assert launches(rows, length) <= met, (multiprocessors, rows, length)


@pytest.mark.parametrize("wanted", [None, True])
@pytest.mark.parametrize("window", [0, 128, 1024])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thorough_warm_up_meets_what_attention_launches_for_few_rows(head_dim, window, wanted):
    few = pytest.importorskip("frame.plugins.attention.triton_few")
    bf16 = torch.bfloat16

    def kinds(rows, length, kv_heads, multiprocessors, most):
        spec = AttentionSpec(32, kv_heads, head_dim, 1.0, bf16, bf16, 16, "cpu", window=window)
        lens = np.full(rows, length or most, np.int32)
        batch = SimpleNamespace(
            host_query_lens=np.ones(rows, np.int32), host_seq_lens=lens, max_query_len=1, deterministic=False,
            prefix=None, seq_lens=torch.from_numpy(lens),
        )  # fmt: skip
        one = few.few_launch(spec, batch, multiprocessors, always=bool(wanted))
        # the room for parts is one size up to 16 splits, and one above
        return one and (one.block_n, one.num_warps, one.lets_in, one.splits > 1, one.splits > 16)

    for multiprocessors in (78, 114, 132, 148):
        for kv_heads in (2, 4, 8, 16):
            for most in (512, 2048, 8192, 131072):
                sizes = kv_heads, multiprocessors, most
                steps = warm_up._more_decodes(16, most)
                met = {kinds(one.padded_rows, one.max_seq_len, *sizes) for one in steps}
                for rows in range(1, 17):
                    for length in (1, 100, 300, 700, 1500, 3000, 6000, 100_000):
                        assert kinds(rows, min(length, most), *sizes) in {*met, None}, (rows, length, *sizes)


def test_decodes_of_a_thorough_warm_up_are_no_longer_than_requests():
    assert {shape.max_seq_len for shape in warm_up._more_decodes(4, 40)} == {0, 40}
