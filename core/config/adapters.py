"""Settings of adapters: small additions to the weights, of which each request may name another."""

from __future__ import annotations

from collections.abc import Iterator

from frame.quoting import quoted
from frame.served.modules import read_module

from .section import Section, setting


class AdapterConfig(Section):
    """Adapters (LoRA): small additions to the weights, of which each request may name another."""

    enable_lora: bool = setting(False, "Serve adapters, see docs/adapters.md.")
    lora_modules: list[str] = setting(
        [], "Adapters to load at the start: NAME=FOLDER, or JSON with name, path and base_model_name."
    )
    max_loras: int = setting(1, "Most adapters that the requests of a step may have.", ge=1, le=512)
    max_lora_rank: int = setting(16, "Highest rank of an adapter; memory is taken for so many.", ge=1, le=512)
    max_cpu_loras: int | None = setting(
        None, "Most adapters that are kept in host memory; default: max_loras. Others are read again when needed.", ge=1
    )
    fully_sharded_loras: bool = setting(
        False, "Divide the first matrices of adapters by rank where devices divide the outputs of a layer."
    )
    adapter_plugin: str = setting("auto", "Adapter plugin; auto: the preferred one.")
    lora_root: str | None = setting(
        None,
        "Folder below which adapters may be loaded, an absolute path: /v1/load_lora_adapter is off without it, and "
        "needs the admin listener.",
    )
    lora_resolver: str | None = setting(
        None, "Adapter resolver plugin, which finds adapters that requests name and nobody loaded; default: none."
    )

    def contradictions(self) -> Iterator[str]:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield f"max_cpu_loras {self.max_cpu_loras} is below max_loras {self.max_loras}: those that run are kept"
        for name in ("lora_modules", "lora_root", "lora_resolver"):
            if getattr(self, name) and not self.enable_lora:
                yield f"{name} needs enable_lora"
        if self.lora_root is not None and not self.lora_root.startswith("/"):
            yield f"lora_root must be an absolute path, got {quoted(self.lora_root)}"
        names = [name for name, _, _ in map(read_module, self.lora_modules)]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            yield f"lora_modules names {quoted(twice[0])} twice"
