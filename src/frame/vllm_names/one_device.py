"""vLLM's functions that programs call before and after they use an engine, for engines on one device."""

from __future__ import annotations

import gc
import socket
import uuid
from typing import Any


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Frees the device memory of engines that nobody refers to; there are no process groups to end."""
    gc.collect()
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def destroy_model_parallel() -> None:
    """Does nothing: an engine on one device has no process groups."""


def destroy_distributed_environment() -> None:
    """Does nothing: an engine on one device has no process groups."""


def get_tensor_model_parallel_rank() -> int:
    """0: an engine runs on one device."""
    return 0


def get_tensor_model_parallel_world_size() -> int:
    """1: an engine runs on one device."""
    return 1


def get_tokenizer(tokenizer_name: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The transformers tokenizer of a folder or name; raises `ValueError` where code of the checkpoint would run."""
    if trust_remote_code:
        raise ValueError("trust_remote_code=True cannot be honoured: no code of a checkpoint is ever run")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, **options)


def get_ip() -> str:
    """The address of this machine that its name stands for; 127.0.0.1 where it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def get_open_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex
