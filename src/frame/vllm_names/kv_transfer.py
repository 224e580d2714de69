"""vLLM's `kv_transfer_config` in frame's settings."""

from __future__ import annotations

import logging
from typing import Any

from frame.core.config.errors import ConfigError
from frame.quoting import quoted

logger = logging.getLogger(__name__)

#: The fields that are taken; the first four have settings of their names.
KV_TRANSFER_FIELDS = (
    "kv_connector", "kv_role", "kv_ip", "kv_load_failure_policy", "kv_connector_extra_config", "kv_buffer_device",
)  # fmt: skip
#: Fields that change nothing here: an engine has an id of its own, which its answers name, and buffers are sized by
#: the connectors' options.
_NO_EFFECT = ("engine_id", "kv_buffer_size")
#: Fields whose default is accepted: field → (default, what to give instead of others).
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "kv_port": (14579, "connectors have ports of their own: give `port` in kv_connector_extra_config"),
    "kv_parallel_size": (1, "a prompt's blocks are read by the one engine that has its request"),
    "enable_permute_local_kv": (False, "blocks of another order are read as they lie, where that is possible"),
    "kv_connector_module_path": ("", "a connector is a plugin: a package offers it by the hook frame_kv_connectors"),
}


def kv_transfer_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the known fields out of `given`. Raises `ConfigError`."""
    settings = {name: given.pop(name) for name in KV_TRANSFER_FIELDS[:4] if name in given}
    extra, device = given.pop("kv_connector_extra_config", None), given.pop("kv_buffer_device", None)
    ignored = [name for name in _NO_EFFECT if given.pop(name, None) is not None]
    if ignored:
        logger.warning("fields of kv_transfer_config that have no effect here: %s", ", ".join(ignored))
    for name, (default, instead) in _DEFAULTS.items():
        value = given.pop(name, default)
        if value != default:
            raise ConfigError(f"kv_transfer_config.{name}={quoted(value)} cannot be honoured: {instead}")
    if device not in (None, "cuda", "cpu"):
        raise ConfigError(f"no kv_buffer_device {quoted(device)}; there are: cuda, cpu")
    if device == "cpu" and not (extra is None or isinstance(extra, dict)):
        raise ConfigError(f"kv_connector_extra_config must map names to values, got {quoted(extra)}")
    if device == "cpu":
        extra = {**(extra or {}), "host_buffer": True}
    if extra and "kv_connector" not in settings:
        raise ConfigError("kv_transfer_config has options of a connector, and must name it: give kv_connector")
    if extra:
        settings["plugin"] = {settings["kv_connector"]: _lmcache(extra)}
    return settings


def _lmcache(extra: Any) -> Any:
    """`extra` with the address of an LMCache server, if it names one, as the connector `lmcache` takes it."""
    host, port = "lmcache.mp.host", "lmcache.mp.port"
    if not isinstance(extra, dict) or not {host, port} & extra.keys():
        return extra
    server = f"tcp:{str(extra.get(host, 'localhost')).removeprefix('tcp://')}:{extra.get(port, 5555)}"
    return {"server": server} | {name: value for name, value in extra.items() if name not in (host, port)}
