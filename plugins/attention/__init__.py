"""The attention backends that ship with frame: `torch` anywhere, `triton` on GPUs, `flash` and `cudnn` by libraries.

Preferences follow what was measured on an H200 (benchmarks/README.md): our own kernels read a decode batch faster than
FlashAttention 3 and need nothing installed. FlashAttention is ahead for prompts of one or two thousand tokens, as is
cuDNN, which pays tens of milliseconds for each new length.
"""

from __future__ import annotations

from frame import Provider, hookimpl

_HERE = "frame.plugins.attention"


@hookimpl
def frame_attention_backends() -> list[Provider]:
    """Plain torch, our own Triton kernels, and two backends by libraries, for users who name them."""
    return [
        Provider(
            "torch",
            f"{_HERE}.torch:TorchAttention",
            api=">=0.2.dev1,<0.3",
            summary="plain torch: any device, any dtype; the fast one on CPU",
            preference=10,
            aliases=("TORCH_SDPA", "CPU_ATTN"),
        ),
        Provider(
            "triton",
            f"{_HERE}.triton:TritonAttention",
            api=">=0.2.dev1,<0.3",
            summary="Triton kernels for CUDA; one for mixed batches, one for decoding",
            preference=20,
            options=f"{_HERE}.triton_options:TritonOptions",
            aliases=("TRITON_ATTN",),
        ),
        Provider(
            "flash",
            f"{_HERE}.flash:FlashAttention",
            api=">=0.2.dev1,<0.3",
            summary="FlashAttention 4, 3 or 2, where one is installed",
            preference=15,
            aliases=("FLASH_ATTN",),
        ),
        Provider(
            "cudnn",
            f"{_HERE}.cudnn:CudnnAttention",
            api=">=0.2.dev1,<0.3",
            summary="new prompts by cuDNN through torch, all else by the Triton kernels",
            preference=12,
        ),
        Provider(
            "torch-latent",
            f"{_HERE}.latent:TorchLatent",
            api=">=0.2.dev1,<0.3",
            summary="latent attention (MLA) in plain torch: any device, any dtype",
            preference=10,
        ),
        Provider(
            "triton-latent",
            f"{_HERE}.triton_latent:TritonLatent",
            api=">=0.2.dev1,<0.3",
            summary="latent attention (MLA) by Triton kernels: absorbed for single tokens, expanded for prompts",
            preference=20,
            aliases=("TRITON_MLA",),
        ),
        Provider(
            "triton-sparse",
            f"{_HERE}.triton_sparse:TritonSparse",
            api=">=0.2.dev1,<0.3",
            summary="sparse latent attention (DeepSeek V3.2) by Triton kernels, absorbed",
            preference=20,
        ),
        Provider(
            "triton-index",
            f"{_HERE}.triton_sparse:TritonIndex",
            api=">=0.2.dev1,<0.3",
            summary="the index of sparse latent attention by Triton kernels",
            preference=20,
        ),
        Provider(
            "torch-index",
            f"{_HERE}.latent_index:TorchIndex",
            api=">=0.2.dev1,<0.3",
            summary="the index of sparse latent attention in plain torch",
            preference=10,
        ),
    ]
