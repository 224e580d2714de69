"""Each rank reads its part of the checkpoint, what all ranks hold, and a row of each tensor for the digest."""

import threading
from collections import Counter

import pytest
import torch

from frame.core.worker.start.numerics import model_digest
from frame.interfaces import LoaderSetup
from frame.plugins.loaders.safetensors import SafetensorsLoader, SafetensorsTensor
from frame.testing import run_ranks
from frame.testing.checkpoints import make_checkpoint
from tests.models.dense import make_model


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_part(size, tmp_path, monkeypatch):
    make_checkpoint(tmp_path, "llama", num_attention_heads=8, num_key_value_heads=4, intermediate_size=256)
    read, count = SafetensorsTensor.read, Counter()

    def counted(self, index=()):
        piece = read(self, index)
        count[threading.get_ident()] += piece.nbytes
        return piece

    monkeypatch.setattr(SafetensorsTensor, "read", counted)
    loader = SafetensorsLoader(LoaderSetup(tmp_path))
    tensors = [(torch.Size(one.shape).numel() * one.dtype.itemsize, one.shape) for one in loader.tensors()]
    everywhere = sum(size for size, shape in tensors if len(shape) == 1)  # norms
    rows = sum(size // shape[0] for size, shape in tensors if len(shape) > 1) + everywhere

    def work(group):
        make_model(tmp_path, group)
        model_digest({}, SafetensorsLoader(LoaderSetup(tmp_path)), [torch.float32])
        return count[threading.get_ident()]

    whole = sum(size for size, _ in tensors)
    for found in run_ranks(size, work):
        assert found <= whole / size + everywhere + rows
