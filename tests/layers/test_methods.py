"""The seam of quantised weights: what fills which parameter, in what order, and what is refused."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from frame.core.layers.methods import Methods
from frame.interfaces import Build, LinearMethod, LinearSpec, Model, ModelSetup, Quantization
from frame.layers import PlainLinear, Rows, WeightError, WeightSlot, load_weights, normed_linear, normed_silu_mul
from tests.contract.quantizations import RoundedLinear
from tests.layers.test_weights import MemoryLoader, make_build


def spec_of(*rows, columns=(0, 256), in_features=256):
    return LinearSpec(tuple(Rows(*row) for row in rows), slice(*columns), in_features)


def slots_of(spec, shape, *units, **options):
    return WeightSlot.sharded("weight", torch.empty(shape), spec, *units, **options)


def test_a_slot_for_each_run_of_rows_in_units():
    spec = spec_of(("q", 256, 128, 128), ("k", 200, 128, 72))
    (q, k) = slots_of(spec, (2, 2), 128, 128)
    assert (q.name, q.shape, q.index, q.region) == ("q.weight", (2, 2), (slice(1, 2), slice(0, 2)), (slice(0, 1),))
    assert (k.name, k.shape, k.index, k.region) == ("k.weight", (2, 2), (slice(1, 2), slice(0, 2)), (slice(1, 2),))


def test_a_unit_for_all_and_tensors_without_columns():
    spec = spec_of(("q", 256, 128, 128), columns=(64, 128))
    (one,) = slots_of(spec, (1, 1), 0, 0)
    assert (one.shape, one.index) == ((1, 1), (slice(0, 1), slice(0, 1)))
    (rows,) = slots_of(spec, (128,), 1, None)
    assert (rows.shape, rows.index) == ((256,), (slice(128, 256),))


def test_packed_columns_that_are_stored_first():
    spec = spec_of(("q", 256, 128, 128), columns=(64, 128))
    parameter = torch.zeros(16, 64)
    (slot,) = WeightSlot.sharded("qweight", parameter, spec, 8, transposed=True)
    assert (slot.shape, slot.index) == ((256, 32), (slice(64, 128), slice(16, 32)))
    stored = torch.arange(256.0 * 32).view(256, 32)
    slot.write(stored[slot.index])
    assert torch.equal(parameter, stored[64:128, 16:32].T)


@pytest.mark.parametrize(
    ("spec", "units", "words"),
    [
        (spec_of(("q", 256, 64, 64)), (128, 1), "rows 64 to 128 of 256, which this rank holds, cut a unit of 128"),
        (spec_of(("q", 256, 0, 64)), (128, 1), "q.weight: rows 0 to 64 of 256"),
        (spec_of(("q", 8, 0, 8), columns=(0, 32)), (1, 128), "q.weight: columns 0 to 32 of 256"),
    ],
)
def test_a_share_that_cuts_a_unit_is_named(spec, units, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        slots_of(spec, (1, 1), *units)


@pytest.mark.parametrize(
    ("names", "prefix"),
    [(["a.b.q", "a.b.k"], "a.b"), (["a.b", "a.b"], "a.b"), (["a.b"], "a.b"), (["x", "y"], "")],
)
def test_a_layer_is_called_what_its_tensors_have_in_common(names, prefix):
    assert spec_of(*((name, 2, 0, 2) for name in names)).prefix == prefix


class One(Model):
    """Two layers, each with a method of its own."""

    def __init__(self, setup, options=None):
        super().__init__(setup, options)
        self.first = setup.build.linear("first", 4, 6, parts={"a": 2, "b": 4}, shard="column")
        self.second = setup.build.linear("second", 6, 4)
        self.ops = setup.build.ops

    def forward(self, inputs, step):
        raise NotImplementedError

    def logits(self, hidden):
        raise NotImplementedError


def build_with(make):
    build = make_build()
    build.methods = Methods(SimpleNamespace(linear=lambda prefix, spec: make(prefix), embedding=lambda *_: None))
    return build


def tensors(**dtypes):
    torch.manual_seed(0)
    made = {
        "first.a.weight": torch.randn(2, 4),
        "first.b.weight": torch.randn(4, 4),
        "second.weight": torch.randn(4, 6),
    }
    return {name: made[name].to(dtypes.get(name, torch.float32)) for name in made}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_codes_are_not_cast_to_weights(dtype):
    model = One(ModelSetup(make_build()))
    stored = {**tensors(), "second.weight": torch.ones(4, 6).to(dtype)}
    words = f"1 of a wrong shape or type: second.weight is {str(dtype)[6:]}, expected float32"
    loader = MemoryLoader(stored)
    with pytest.raises(WeightError, match=re.escape(words)):
        load_weights(model, loader)
    assert loader.reads == []
    with pytest.raises(WeightError, match=re.escape(words)):
        model.load([("second.weight", stored["second.weight"])])


def test_a_slot_that_names_a_type_takes_no_other():
    slot = WeightSlot("w", (2,), torch.empty(2, dtype=torch.int32), dtype=torch.int32)
    assert slot.misfit("w", (2,), torch.int32) == ""
    assert slot.misfit("w", (2,), torch.int64) == "w is int64, expected int32"
    wide = WeightSlot("w", (2,), torch.empty(2), dtype=torch.bfloat16)
    assert wide.misfit("w", (2,), torch.float16) == "w is float16, expected bfloat16"


class Staging(LinearMethod):
    """Keeps what was stored until the whole layer is there."""

    stages = True

    def __init__(self, log, prefix):
        self.log, self.prefix = log, prefix

    def create(self, layer):
        spec = layer.spec
        layer.kept = layer.empty(spec.out_features, spec.width)
        layer.staged = torch.empty(0)
        slots, start = [], 0
        for part in spec.rows:
            rows = (slice(start, start + part.count),)
            slots.append(WeightSlot(f"{part.name}.weight", (part.total, spec.in_features), layer.staged, (), rows))
            start += part.count
        return slots

    def begin_load(self, layer):
        self.log.append(("begin", self.prefix, sum(one for one in self.log if isinstance(one, int))))
        layer.staged.data = torch.full(layer.kept.shape, float("nan"))

    def finish_load(self, layer):
        assert torch.isfinite(layer.staged).all()
        self.log.append(("finish", self.prefix, 0))
        layer.kept.copy_(-layer.staged)
        layer.staged.data = torch.empty(0)

    def apply(self, layer, x, bias):
        return layer.ops.linear(x, layer.kept, bias)


def test_layers_that_stage_are_loaded_one_after_the_other():
    log = []
    model = One(ModelSetup(build_with(partial(Staging, log))))
    for _ in range(2):
        load_weights(model, MemoryLoader(tensors()))
    order = [entry[:2] for entry in log]
    assert order == [("begin", "first"), ("finish", "first"), ("begin", "second"), ("finish", "second")] * 2
    assert torch.equal(model.second.kept, -tensors()["second.weight"])
    log.clear()
    for name, tensor in tensors().items():
        model.load([(name, tensor)])
    assert [entry[:2] for entry in log] == [("begin", "first"), ("begin", "second")]
    model.finish_load()
    assert [entry[:2] for entry in log[2:]] == [("finish", "first"), ("finish", "second")]
    model.finish_load()  # as a rehearsal does: nothing was begun
    assert len(log) == 4


def test_pieces_to_take_are_read_no_more_at_once_than_the_largest():
    model = One(ModelSetup(build_with(lambda prefix: RoundedLinear())))
    sizes = []

    def fill(pieces):
        pieces = list(pieces)
        sizes.append(sum(target.numel() for target, _ in pieces))
        for target, read in pieces:
            target.copy_(read())

    given = tensors()
    load_weights(model, MemoryLoader(given), fill)
    assert sizes == [24, 24]  # the first two tensors together are as large as the third
    weight = torch.cat((given["first.a.weight"], given["first.b.weight"]))
    found = model.first.codes * model.first.scales
    torch.testing.assert_close(found, weight, atol=0.02, rtol=0)
    before = model.first.codes.clone()
    model.load(list(given.items()))
    assert torch.equal(model.first.codes, before)


def test_stored_types_are_what_is_taken():
    seen = []
    slot = WeightSlot("w", (4, 2), torch.empty(1), (slice(0, 2),), take=lambda piece: seen.append(piece))
    assert slot.misfit("w", (4, 2), torch.bfloat16) == ""
    assert slot.misfit("w", (4, 2), torch.int8) == "w is int8, expected float32"
    assert slot.place(torch.bfloat16).shape == (2, 2)
    slot.write(torch.ones(2, 2, dtype=torch.bfloat16))
    assert seen[0].dtype == torch.bfloat16


class Doubled(LinearMethod):
    """Wraps another method, as an adapter does, and adds half of what it gives."""

    def __init__(self, inner):
        self.inner = inner

    def create(self, layer):
        layer.share = layer.empty(1)
        layer.share.data.fill_(0.5)
        return self.inner.create(layer)

    def apply(self, layer, x, bias):
        out = self.inner.apply(layer, x, bias)
        return out + layer.share * out

    def apply_normed(self, layer, x, residual, norm, bias):
        out, normed, total = self.inner.apply_normed(layer, x, residual, norm, bias)
        return out + layer.share * out, normed, total

    def apply_normed_gated(self, layer, x, residual, norm, bias):
        out, _, total = self.apply_normed(layer, x, residual, norm, bias)
        return layer.ops.silu_mul(out), total


@pytest.mark.parametrize("inner", [PlainLinear, RoundedLinear])
def test_a_method_may_wrap_another(inner):
    """Through every way in which layers are called."""
    plain = One(ModelSetup(build_with(lambda prefix: inner())))
    wrapped = One(ModelSetup(build_with(lambda prefix: Doubled(inner()))))
    for model in (plain, wrapped):
        load_weights(model, MemoryLoader(tensors()))
    x, residual, norm = torch.randn(3, 4), torch.randn(3, 4), make_build().norm("norm", 4, eps=1e-6)
    norm.weight.data.fill_(1.0)
    torch.testing.assert_close(wrapped.first(x), 1.5 * plain.first(x))
    found, expected = (normed_linear(norm, model.first, x, residual) for model in (wrapped, plain))
    torch.testing.assert_close(found[0], 1.5 * expected[0])
    gated, _ = normed_silu_mul(norm, wrapped.first, x, residual)
    torch.testing.assert_close(gated, wrapped.ops.silu_mul(1.5 * expected[0]))
    torch.testing.assert_close(wrapped.first.silu_mul(x), wrapped.ops.silu_mul(1.5 * plain.first(x)))


def test_a_router_says_that_it_is_exact():
    seen = {}

    class Seeing(Quantization):
        def __init__(self):
            pass

        @classmethod
        def reads(cls, quantization_config):
            return False

        def linear(self, prefix, spec):
            seen[prefix] = spec.exact

    from frame.interfaces import RouterSpec
    from frame.layers import Router

    build: Build = make_build()
    build.methods = Methods(Seeing())
    Router(build, "gate", 6, RouterSpec(4, 2))
    build.linear("down", 4, 4, shard="row")
    assert seen == {"gate": True, "down": False}
