"""The adapters that ship with frame, and what finds them by name."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_adapters() -> list[Provider]:
    """Formats of adapters that models are served with."""
    return [
        Provider(
            "lora",
            "frame.plugins.adapters.lora:LoraAdapters",
            _API,
            "low-rank additions (LoRA) in PEFT's folders",
            options="frame.plugins.adapters.lora_options:LoraOptions",
            tags={"check": "frame.plugins.adapters.peft_config:check_folder"},
        )
    ]


@hookimpl
def frame_adapter_resolvers() -> list[Provider]:
    """What finds adapters that requests name and nobody loaded."""
    return [
        Provider(
            "folder",
            "frame.plugins.adapters.folder:FolderResolver",
            _API,
            "the folder of that name below --plugin.folder.root",
            options="frame.plugins.adapters.folder_options:FolderOptions",
        )
    ]
