"""Expert exchanges that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_expert_exchanges() -> list[Provider]:
    """What moves tokens between data ranks that share experts."""
    return [
        Provider(
            name="gather",
            target="frame.plugins.exchanges.gather:GatherExchange",
            api=_API,
            summary="Gives every rank all tokens, and each data rank the sums of its own; captured in graphs.",
            preference=20,
        ),
        Provider(
            name="peer-memory",
            target="frame.plugins.exchanges.peer_memory:PeerMemoryExchange",
            api=_API,
            summary="Kernels that write few tokens into the memory of other GPUs of the machine; gathers larger steps.",
            options="frame.plugins.exchanges.options:PeerMemoryOptions",
        ),
        Provider(
            name="all-to-all",
            target="frame.plugins.exchanges.all_to_all:AllToAllExchange",
            api=_API,
            summary="Sends a token only to ranks that hold its experts, with the collectives of any platform.",
            preference=10,
        ),
        Provider(
            name="deepep",
            target="frame.plugins.exchanges.deepep:DeepepExchange",
            api=_API,
            summary="DeepEP's exchange for prompts and large batches; needs GPUs and the package deep_ep.",
        ),
        Provider(
            name="deepep-low-latency",
            target="frame.plugins.exchanges.deepep:DeepepLowLatencyExchange",
            api=_API,
            summary="DeepEP's exchange for decode steps of up to 511 tokens, captured in graphs; needs deep_ep.",
        ),
        Provider(
            name="flashinfer",
            target="frame.plugins.exchanges.flashinfer:FlashinferExchange",
            api=_API,
            summary="FlashInfer's exchange over NVLink, captured in graphs; needs GPUs and the package flashinfer.",
        ),
        Provider(
            name="pplx",
            target="frame.plugins.exchanges.pplx:PplxExchange",
            api=_API,
            summary="pplx-kernels' exchange between GPUs of a machine, captured in graphs; needs pplx_kernels.",
        ),
    ]
