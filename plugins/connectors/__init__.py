"""The KV connectors that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_kv_connectors() -> list[Provider]:
    """Blocks of prompts in this machine's memory, on a disk, or of other engines."""
    here = "frame.plugins.connectors"
    secret = f"{here}.blocks.secret_check:check_secret"
    return [
        Provider(
            "disk",
            f"{here}.disk.scheduler:DiskScheduler",
            api=">=0.2.dev1,<0.3",
            summary="prompt blocks in a folder that engines share and that outlives them",
            options=f"{here}.disk.messages:DiskOptions",
            tags={"worker": f"{here}.disk.worker:DiskWorker", "check": f"{here}.disk.check:check_options"},
        ),
        Provider(
            "peer",
            f"{here}.peer.scheduler:PeerScheduler",
            api=">=0.2.dev1,<0.3",
            summary="prompt blocks that other engines hold, over Unix or TCP sockets",
            options=f"{here}.peer.options:PeerOptions",
            # its blocks end with the engine, so `frame plugins check` does not expect a second engine to find them
            tags={"worker": f"{here}.peer.worker:PeerWorker", "check": secret, "stores": "no"},
        ),
        Provider(
            "offload",
            f"{here}.offload.scheduler:OffloadScheduler",
            api=">=0.2.dev45,<0.3",
            summary="prompt blocks in this machine's memory, for prompts that the device no longer holds",
            options=f"{here}.offload.options:OffloadOptions",
            # they end with the engine, so `frame plugins check` does not expect a second engine to find them
            tags={
                "worker": f"{here}.offload.worker:OffloadWorker",
                "check": f"{here}.offload.check:check_options",
                "device_bytes": f"{here}.offload.options:device_bytes",
                "tier-policy": "policy",
                "stores": "no",
            },
            aliases=("OffloadingConnector",),
        ),
        Provider(
            "nixl",
            f"{here}.nixl.scheduler:NixlScheduler",
            api=">=0.2.dev1,<0.3",
            summary="prompt blocks that decode engines read from a prefill engine's memory, through NIXL",
            options=f"{here}.nixl.options:NixlOptions",
            aliases=("NixlConnector",),
            tags={"worker": f"{here}.nixl.worker:NixlWorker", "check": secret, "stores": "no"},
        ),
        Provider(
            "lmcache",
            f"{here}.lmcache.scheduler:LMCacheScheduler",
            api=">=0.2.dev1,<0.3",
            summary="prompt blocks at an LMCache server of this machine, in shared memory",
            options=f"{here}.lmcache.options:LMCacheOptions",
            aliases=("LMCacheConnectorV1", "LMCacheMPConnector"),
            tags={"worker": f"{here}.lmcache.worker:LMCacheWorker", "stores": "no"},
        ),
        Provider(
            "push",
            f"{here}.push.scheduler:PushScheduler",
            api=">=0.2.dev1,<0.3",
            summary="prompt blocks that a prefill engine sends to decode engines, layer by layer while it computes",
            options=f"{here}.push.options:PushOptions",
            tags={
                "worker": f"{here}.push.worker:PushWorker",
                "check": secret,
                "device_bytes": f"{here}.push.options:device_bytes",
                "stores": "no",
            },
        ),
        Provider(
            "mooncake",
            f"{here}.mooncake.scheduler:MooncakeScheduler",
            api=">=0.2.dev1,<0.3",
            summary="prompt blocks that a prefill engine writes to decode engines that ask for them, through Mooncake",
            options=f"{here}.mooncake.options:MooncakeOptions",
            aliases=("MooncakeConnector",),
            tags={"worker": f"{here}.mooncake.worker:MooncakeWorker", "check": secret, "stores": "no"},
        ),
        Provider(
            "multi",
            f"{here}.multi.scheduler:MultiScheduler",
            api=">=0.2.dev46,<0.3",
            summary="several connectors at once: the first that has a prompt loads it, all save",
            options=f"{here}.multi.messages:MultiOptions",
            aliases=("MultiConnector",),
            tags={"worker": f"{here}.multi.worker:MultiWorker", "children": "connectors", "stores": "no"},
        ),
        Provider(
            "decode-bench",
            f"{here}.decode_bench.scheduler:DecodeBenchScheduler",
            api=">=0.2.dev1,<0.3",
            summary="made-up blocks instead of prompts that are computed, to load-test the decoding",
            options=f"{here}.decode_bench.messages:DecodeBenchOptions",
            aliases=("DecodeBenchConnector",),
            tags={"worker": f"{here}.decode_bench.worker:DecodeBenchWorker", "stores": "no"},
        ),
    ]
