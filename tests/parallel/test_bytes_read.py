"""Each rank reads its part of the checkpoint, what all ranks hold, and a row of each tensor for the digest."""

import re
import threading
from collections import Counter

import pytest
import torch

from frame.core.worker.start.numerics import model_digest
from frame.interfaces import LoaderSetup, Mesh
from frame.plugins.loaders.safetensors import SafetensorsLoader, SafetensorsTensor
from frame.testing import run_mesh
from frame.testing.checkpoints import make_checkpoint
from tests.models.dense import fuse_experts, make_model

#: Sizes that all ranks divide, with heads of 16 features.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
#: Families by the form of their tensors.
FORMS = {
    "llama": "apart", "phi3": "joined", "olmo2": "norms over all heads", "gpt2": "transposed", "qwen3-moe": "experts"
}  # fmt: skip
#: What every rank needs whole: norms of the hidden state or of each head, routers, positions, and biases of sums.
EVERYWHERE = re.compile(
    r".*(layernorm|\.norm|ln_.|mlp\.gate|wpe)\.(weight|bias)|.*(o_proj|down_proj|c_proj)\.bias|.*[qk]_norm\.weight"
)


def measured(folder, mesh, monkeypatch, **settings):
    """By rank: the bytes that its weights take, and those with the samples of the model's digest."""
    read, count = SafetensorsTensor.read, Counter()

    def counted(self, index=()):
        piece = read(self, index)
        count[threading.get_ident()] += piece.nbytes
        return piece

    def work(groups):
        make_model(folder, groups=groups, **settings)
        weights = count[threading.get_ident()]
        model_digest({}, SafetensorsLoader(LoaderSetup(folder)), [torch.float32])
        return weights, count[threading.get_ident()]

    monkeypatch.setattr(SafetensorsTensor, "read", counted)
    return run_mesh(mesh, work)


def sizes(folder):
    """Bytes of each tensor of a checkpoint, by name; and of one row of each together."""
    tensors = list(SafetensorsLoader(LoaderSetup(folder)).tensors())
    found = {one.name: torch.Size(one.shape).numel() * one.dtype.itemsize for one in tensors}
    return found, sum(found[one.name] // (one.shape[0] if len(one.shape) > 1 else 1) for one in tensors)


def whole_on_each(tensors, family):
    """The bytes that every tensor rank reads; OLMo 2's norms of queries and keys are divided as their heads are."""
    divided = re.compile(r".*[qk]_norm\.weight" if family == "olmo2" else r"(?!)")
    return sum(count for name, count in tensors.items() if EVERYWHERE.fullmatch(name) and not divided.fullmatch(name))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FORMS, ids=FORMS.values())
def test_a_rank_reads_its_part(family, size, tmp_path, monkeypatch):
    make_checkpoint(tmp_path, family, **({} if family == "gpt2" else SIZES))
    tensors, rows = sizes(tmp_path)
    everywhere = whole_on_each(tensors, family)
    for weights, both in measured(tmp_path, Mesh(tensor=size), monkeypatch):
        assert weights == (sum(tensors.values()) - everywhere) / size + everywhere
        assert weights < both <= weights + rows


@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_key_heads_that_two_ranks_hold_are_read_by_two(family, tmp_path, monkeypatch):
    make_checkpoint(tmp_path, family, **{**SIZES, "num_key_value_heads": 2})
    tensors, _ = sizes(tmp_path)
    everywhere, layers = whole_on_each(tensors, family), 3
    keys = layers * 2 * 16 * 4 * (64 + 64 + (family == "olmo2"))  # keys, values, and the norm of keys
    for weights, _ in measured(tmp_path, Mesh(tensor=4), monkeypatch):
        assert weights == (sum(tensors.values()) - everywhere - keys) / 4 + keys / 2 + everywhere


@pytest.mark.parametrize(
    ("mesh", "share"),
    [(Mesh(tensor=2, expert_parallel=True), 2), (Mesh(data=2, expert_parallel=True), 1)],
    ids=["over tensor ranks", "over engines"],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_reads_its_experts(mesh, share, fused, tmp_path, monkeypatch):
    """Half of the experts; of the rest `share` ranks read their parts, engines read it whole."""
    make_checkpoint(tmp_path, "qwen3-moe", **SIZES)
    if fused:
        fuse_experts(tmp_path)
    tensors, rows = sizes(tmp_path)
    experts = sum(count for name, count in tensors.items() if ".experts." in name)
    everywhere = whole_on_each(tensors, "qwen3-moe")
    others = sum(tensors.values()) - experts - everywhere
    assert experts > sum(tensors.values()) / 3
    for weights, both in measured(tmp_path, mesh, monkeypatch):
        assert weights == experts / 2 + others / share + everywhere
        assert weights < both <= weights + rows


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_reads_what_its_slots_hold(fused, tmp_path, monkeypatch):
    """With two redundant experts five of ten slots lie on each rank; the last two of the second hold two again."""
    make_checkpoint(tmp_path, "qwen3-moe", **SIZES)
    if fused:
        fuse_experts(tmp_path)
    tensors, _ = sizes(tmp_path)
    experts = sum(count for name, count in tensors.items() if ".experts." in name)
    others = sum(tensors.values()) - experts
    everywhere = whole_on_each(tensors, "qwen3-moe")
    for weights, _ in measured(tmp_path, Mesh(tensor=2, expert_parallel=True), monkeypatch, redundant_experts=2):
        assert weights == experts * 5 / 8 + (others - everywhere) / 2 + everywhere
