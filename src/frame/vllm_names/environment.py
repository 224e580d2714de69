"""vLLM's environment variables: which one is taken, and one line for each other that is set. Reads none itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: The variable whose value is taken: without it a server that had a key under vLLM would be open.
API_KEY = "VLLM_API_KEY"

#: What to give instead of a variable.
REMEDIES: Mapping[str, str] = MappingProxyType({
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "give --max-model-len and --hf-overrides",
    "VLLM_ATTENTION_BACKEND": "give --attention-backend",
    "VLLM_CONFIGURE_LOGGING": "give --log-level",
    "VLLM_CPU_KVCACHE_SPACE": "give --kv-cache-memory-bytes",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "give --executor inline or process",
    "VLLM_HOST_IP": "give --host",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "the server keeps connections alive by itself",
    "VLLM_KV_CACHE_LAYOUT": "give --attention-backend; its plugin chooses the layout",
    "VLLM_LOGGING_CONFIG_PATH": "give --log-level",
    "VLLM_LOGGING_LEVEL": "give --log-level",
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "models take text only",
    "VLLM_PLUGINS": "give the names of plugins, such as --attention-backend PACKAGE:NAME; `frame plugins` lists them",
    "VLLM_PORT": "give --port",
    "VLLM_SERVER_DEV_MODE": "give --admin-port, which has the routes of operators",
    "VLLM_TORCH_PROFILER_DIR": "give --profile-dir",
    "VLLM_USE_MODELSCOPE": "give the folder of the model",
})  # fmt: skip


def api_key_of(environment: Mapping[str, str]) -> list[str]:
    """The keys of `VLLM_API_KEY`; [] where it is not set or empty."""
    key = environment.get(API_KEY, "")
    return [key] if key else []


def lines_about(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each variable of vLLM's that is set, without its value."""
    found = sorted(name for name in environment if name.startswith("VLLM_") and name != API_KEY)
    return [
        f"{name} is set, and frame does not read it: {REMEDIES.get(name, 'it has no effect here')}" for name in found
    ]
