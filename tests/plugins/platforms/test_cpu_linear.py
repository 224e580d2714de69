"""Products by oneDNN and packed weights give what torch's plain products give, wherever weights are read or written."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from frame import LLM, SamplingParams
from frame.core.ops import Ops
from frame.plugins.platforms import cpu_linear
from frame.plugins.platforms.cpu import HostMemory
from frame.plugins.platforms.cpu_linear import LEAST_PRODUCT, has_onednn, packed, packs, product
from frame.plugins.platforms.cpu_ops import CpuOps
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import prompts

pytestmark = pytest.mark.skipif(not has_onednn(), reason="torch has no oneDNN here")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any size are packed."""
    monkeypatch.setattr(cpu_linear, "LEAST_PACKED", 0)
    if not packs(torch.float32):
        pytest.skip("equal rows of packed products differ here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 49])
@pytest.mark.parametrize("packs_it", [False, True])
def test_products_of_every_shape_are_torchs(dtype, rows, packs_it, always):
    draw = torch.Generator().manual_seed(rows)
    columns = -(-LEAST_PRODUCT // 75) if dtype == torch.float32 and not packs_it else 210
    weight = torch.randn(75, columns, generator=draw).to(dtype) / columns**0.5
    given = packed(weight) if packs_it else weight
    if given is None:
        pytest.skip("no packed weights of this type")
    for x in (torch.randn(rows, columns, generator=draw), torch.randn(2, rows, 2 * columns, generator=draw)[..., ::2]):
        for bias in (None, torch.randn(75, generator=draw).to(dtype), torch.randn(75, 2).to(dtype)[:, 0]):
            found, want = product(x.to(dtype), given, bias), Ops.linear(x.to(dtype), weight, bias)
            torch.testing.assert_close(found, want, atol=1e-4 if dtype == torch.float32 else 0.04, rtol=1e-2)
            assert found.is_contiguous()


def test_a_weight_of_another_stage_stays_as_it_is(always):
    assert packed(torch.empty(64, 64, device="meta")) is None


def test_a_weight_with_strides_is_multiplied_as_it_is():
    weight = torch.randn(2048, 1100)[:, ::2].t()
    x = torch.randn(4, 2048)
    torch.testing.assert_close(product(x, weight), x @ weight.t(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_rows_keep_their_bits_in_any_batch(dtype, always):
    weight = torch.randn(333, 130).to(dtype)
    given, ops = packed(weight), CpuOps()
    if given is None:
        pytest.skip("no packed weights of this type")
    ops.invariant = True
    x = torch.randn(37, 130).to(dtype)
    whole = ops.linear(x, given)
    for rows in (slice(0, 1), slice(5, 21), slice(20, 37)):
        assert torch.equal(ops.linear(x[rows], given), whole[rows])


def open_llm(folder, **settings):
    small = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "executor": "inline"}
    return LLM(str(folder), **{**small, **settings})


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_weights_are_packed_wherever_they_come_from(family, tmp_path, always):
    """Loaded, stored and restored, dropped by a sleep and read again: the tokens stay, and so do the stored bytes."""
    folder = make_checkpoint(tmp_path / "plain", family)
    given = [{"prompt_token_ids": one} for one in prompts(512)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def tokens(llm):
        return [output.outputs[0].token_ids for output in llm.generate(given, params, use_tqdm=False)]

    def num_packed(llm):
        (found,) = llm.collective_rpc(
            lambda worker: sum(one.is_mkldnn for one in (*worker.model.parameters(), *worker.model.buffers()))
        )
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_linear, "LEAST_PACKED", 1 << 40)
        with closing(open_llm(folder)) as llm:
            want = tokens(llm)
            assert num_packed(llm) == 0
            llm.save_sharded_state(str(tmp_path / "expected"))
    with closing(open_llm(folder)) as llm:
        all_packed = num_packed(llm)
        assert all_packed > 4
        assert tokens(llm) == want
        llm.save_sharded_state(str(tmp_path / "state"))
        assert num_packed(llm) == all_packed
        assert tokens(llm) == want
        llm.sleep(level=2)
        assert num_packed(llm) == 0
        llm.wake_up()
        assert num_packed(llm) == all_packed
        assert tokens(llm) == want
    [stored, expected] = [
        load_file(tmp_path / name / "model-rank-0-part-0.safetensors") for name in ("state", "expected")
    ]
    assert stored.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())
    with closing(open_llm(tmp_path / "state", load_format="sharded_state")) as llm:
        assert num_packed(llm) == all_packed
        assert tokens(llm) == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_packed_copy_of_a_tied_head_counts_as_weights(dtype, tmp_path, monkeypatch):
    """It counts before anything is read, and when the cache gets its share of the machine's memory."""
    if not packs(getattr(torch, dtype)):
        pytest.skip("no packed weights of this type")
    folder, found = make_checkpoint(tmp_path, "llama-tied", vocab_size=16_384), {}

    def lacks(memory, start, utilization, needed_bytes):
        found.setdefault("needed", []).append(needed_bytes)

    def kv_bytes(memory, start, utilization, weights_bytes, full_bytes):
        found["weights"] = weights_bytes
        return full_bytes

    monkeypatch.setattr(HostMemory, "lacks", lacks)
    monkeypatch.setattr(HostMemory, "kv_bytes", kv_bytes)
    with closing(open_llm(folder, dtype=dtype, num_gpu_blocks_override=None)) as llm:
        ((weights, copies, others),) = llm.collective_rpc(held)
    assert copies >= 16_384 * 32 * getattr(torch, dtype).itemsize
    assert found["weights"] == weights + copies
    assert max(found["needed"]) == weights + copies + others


def held(worker) -> tuple[int, int, int]:
    """Bytes of parameters, of packed copies and of other buffers."""
    buffers = list(worker.model.buffers())
    copies = sum(one.nbytes for one in buffers if one.is_mkldnn)
    return sum(one.nbytes for one in worker.model.parameters()), copies, sum(one.nbytes for one in buffers) - copies
