"""Which backends serve latent attention and its index, what users may name, and which blocks layers share."""

from __future__ import annotations

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.interfaces.kv_layout import pool_bytes
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.attention_binding import ChosenBackends, choose_backends
from frame.interfaces import Build, Groups, IndexSpec, LatentKV, LatentSpec
from frame.ops import Ops

REGISTRY = Registry.load()


def chosen(*, index: bool = True, device_type: str = "cpu", **settings: object) -> ChosenBackends:
    """The backends of two layers of latent attention, of which the first may have an index."""
    half = torch.bfloat16
    build = Build(
        config=None, dtype=half, device=torch.device("meta"), ops=Ops(), groups=Groups.single(), kv_dtype=half,
        device_type=device_type, max_model_len=64,
    )  # fmt: skip
    for name in ("first", "second"):
        sizes = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
        build.latent_attention(name, 16, scale=0.1, top_k=8 if index else 0, **sizes)
    if index:
        build.sparse_index("first.indexer", 64, 128, top_k=8, scale=0.1)
    return choose_backends(build.caches, from_flat(settings), REGISTRY)


def test_each_kind_of_layer_gets_a_backend_of_its_kind() -> None:
    found = {type(spec): provider.name for spec, provider in chosen().providers.items()}
    assert found == {LatentSpec: "torch-latent", IndexSpec: "torch-index"}


def test_latents_and_keys_of_an_index_share_blocks_of_their_own_sizes() -> None:
    layout = chosen().layout
    (group,) = layout.groups
    assert dict(zip(group.layers, group.specs, strict=True)) == {
        "first": LatentKV(dim=576, dtype="bfloat16"),
        "second": LatentKV(dim=576, dtype="bfloat16"),
        "first.indexer": LatentKV(dim=128, dtype="bfloat16"),
    }
    assert pool_bytes(layout) == (16 * 2 * (576 + 576 + 128),)


def test_a_backend_that_the_user_names_serves_the_layers_of_its_kind() -> None:
    found = chosen(attention_backend="torch-latent").providers
    assert [provider.name for provider in found.values()] == ["torch-latent", "torch-index"]
    with pytest.raises(PluginError, match="'torch' cannot be used here: it serves AttentionSpec, not LatentSpec"):
        chosen(attention_backend="torch")
    with pytest.raises(PluginError, match="'triton-latent' cannot be used here: sparse attention not supported"):
        chosen(attention_backend="triton-latent")


def test_vllms_name_of_the_kernels() -> None:
    found = chosen(index=False, device_type="cuda", attention_backend="TRITON_MLA").providers
    assert [provider.name for provider in found.values()] == ["triton-latent"]


def test_a_gpu_gets_the_kernels() -> None:
    assert [one.name for one in chosen(index=False, device_type="cuda").providers.values()] == ["triton-latent"]
    assert [one.name for one in chosen(device_type="cuda").providers.values()] == ["triton-sparse", "triton-index"]
    torch_index = chosen(device_type="cuda", attention_backend="torch-index").providers.values()
    assert [one.name for one in torch_index] == ["triton-sparse", "torch-index"]


def test_the_kernels_of_sparse_attention_serve_nothing_else() -> None:
    with pytest.raises(PluginError, match=r"'triton-sparse' cannot .* attention to all tokens not supported"):
        chosen(index=False, device_type="cuda", attention_backend="triton-sparse")


def test_what_of_sparse_attention_is_not_deterministic() -> None:
    """The index is: only attention says why not."""
    assert chosen(device_type="cuda").not_deterministic == (
        "attention backend 'triton-sparse': deterministic steps not supported"
    )
    assert "deterministic steps not supported" in chosen(index=False, device_type="cuda").not_deterministic
