"""The attention backends that ship with frame: `torch` everywhere, `triton` where there is a GPU."""

from __future__ import annotations

from frame import Provider, hookimpl

_HERE = "frame.plugins.attention"


@hookimpl
def frame_attention_backends() -> list[Provider]:
    """Plain torch, and our own Triton kernels."""
    return [
        Provider(
            "torch",
            f"{_HERE}.torch:TorchAttention",
            api=">=0.1,<0.2",
            summary="plain torch: any device, any dtype; the fast one on CPU",
            preference=10,
            aliases=("TORCH_SDPA", "CPU_ATTN"),
        ),
        Provider(
            "triton",
            f"{_HERE}.triton:TritonAttention",
            api=">=0.1,<0.2",
            summary="Triton kernels for CUDA; one for mixed batches, one for decoding",
            preference=20,
            options=f"{_HERE}.triton:TritonOptions",
            aliases=("TRITON_ATTN",),
        ),
    ]
