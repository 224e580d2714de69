"""What tells blocks of different models, element types and layouts apart, and what must not."""

import msgspec
import pytest
import torch
from torch import nn

from frame.core.interfaces.attention import AttentionSpec, BlockFormat
from frame.core.interfaces.kv import FullKV, KVGroup, KVLayout
from frame.core.worker.start.numerics import block_numerics, fingerprint

SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32, block_size=4,
    device_type="cpu",
)  # fmt: skip
GROUP = KVGroup(spec=FullKV(num_kv_heads=1, head_dim=4, dtype="float32"), layers=("a",), block_size=4)
LAYOUT = KVLayout(groups=(GROUP,), num_blocks=10, page_bytes=64, num_slots=1)


class Backend:
    spec = SPEC
    order = (0, 1, 2, 3)

    def kv_format(self, spec):
        return BlockFormat((2, spec.block_size, spec.num_kv_heads, spec.head_dim), self.order, spec.kv_dtype, 1)


class OtherOrder(Backend):
    order = (1, 0, 2, 3)


def make_model(seed=0, table_rows=32, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30)).to(dtype)
    model.register_buffer("cos_sin", torch.outer(torch.arange(float(table_rows)), torch.arange(4.0)))
    return model


def digest(model=None, layout=LAYOUT, backend=None, **facts):
    return block_numerics(model or make_model(), layout, [backend or Backend()], {"dtype": "float32", **facts})


def test_equal_engines_agree_whatever_their_size():
    larger = msgspec.structs.replace(LAYOUT, num_blocks=1000)
    assert digest(make_model(table_rows=500), larger) == digest()


@pytest.mark.parametrize(
    "other",
    [
        lambda: digest(make_model(seed=1)),
        lambda: digest(make_model(dtype=torch.bfloat16)),
        lambda: digest(backend=OtherOrder()),
        lambda: digest(platform="cuda"),
        lambda: digest(layout=msgspec.structs.replace(LAYOUT, groups=(msgspec.structs.replace(GROUP, layers=("b",)),))),
    ],
)
def test_what_changes_a_block_changes_the_digest(other):
    assert other() != digest()


def test_a_change_to_one_whole_tensor_is_seen():
    changed = make_model()
    with torch.no_grad():
        changed[1].weight.add_(0.01)
    assert fingerprint(changed) != fingerprint(make_model())
    changed = make_model()
    changed.cos_sin.mul_(0.5)
    assert fingerprint(changed) != fingerprint(make_model())


def test_sixteen_and_eight_bit_weights_have_a_fingerprint():
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(3, 5).to(dtype), requires_grad=False)
        model.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        assert len(fingerprint(model)) == 32
    assert len(fingerprint(nn.Module())) == 32
