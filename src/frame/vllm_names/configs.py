"""vLLM's configuration classes, as mappings of the fields that were given; `arguments` checks and translates them."""

from __future__ import annotations

from typing import Any


class _Fields(dict[str, Any]):
    """The fields of one object by name; None leaves a field to its default."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})


class AttentionConfig(_Fields):
    """For `attention_config`."""


class CompilationConfig(_Fields):
    """For `compilation_config`."""


class KVEventsConfig(_Fields):
    """For `kv_events_config`."""


class KVTransferConfig(_Fields):
    """For `kv_transfer_config`."""


class PoolerConfig(_Fields):
    """For `pooler_config`."""


class ProfilerConfig(_Fields):
    """For `profiler_config`."""


class SpeculativeConfig(_Fields):
    """For `speculative_config`."""


class StructuredOutputsConfig(_Fields):
    """For `structured_outputs_config`."""
