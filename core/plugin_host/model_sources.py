"""Replaces the names of models in a configuration by folders, which a model source fetches."""

from __future__ import annotations

import os
import signal

from frame.quoting import quoted

from ..config.checkpoint import is_name, may_be_described
from ..config.errors import ConfigError
from ..config.tree import FrameConfig
from ..interfaces.provider import Provider
from ..interfaces.setup import SourceSetup
from ..interfaces.source import ModelSource
from .registry import Registry


def fetch_model(config: FrameConfig, *, command: bool = False, only_cached: bool = False) -> FrameConfig:
    """Fetches the model and the tokenizer that `config` names, unless they are checkpoints; the result names folders.

    A model that is there in another form than a checkpoint's is described by a folder where a source knows the form.

    Requests may go on to use the model's name. `command`: an interrupt ends the process at once, without waiting for
    transfers. `only_cached`: takes what was fetched before, also without its weights. Raises `ConfigError` or
    `PluginError`.
    """
    names = is_name(config.model.model), is_name(config.model.tokenizer), may_be_described(config.model.model)
    if not any(names):
        return config
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130)) if command else None
    try:
        return _fetch_all(config, only_cached)
    finally:
        if command:
            signal.signal(signal.SIGINT, before)


def _fetch_all(config: FrameConfig, only_cached: bool) -> FrameConfig:
    model, load, registry = config.model, config.load, Registry.load()
    offline, changed = load.offline or only_cached, dict[str, object]()
    if model.tokenizer and is_name(model.tokenizer):
        folder = _source(config, registry, model.tokenizer, offline).fetch(model.tokenizer, None, weights=False)
        changed["tokenizer"] = str(folder)
    if is_name(model.model) or (may_be_described(model.model) and _sources(registry, model.model)):
        source = _source(config, registry, model.model, offline)
        folder = source.fetch(model.model, model.revision, weights=not (only_cached or load.load_format == "dummy"))
        names = model.served_model_name or [model.model]
        changed |= {"model": str(folder), "revision": None, "served_model_name": names}
        if folder.parent.name == "snapshots":  # other revisions lie beside it, for updates of weights
            changed |= {"model": str(folder.parent.parent), "revision": folder.name}
    return config.model_copy(update={"model": model.model_copy(update=changed)})


def _sources(registry: Registry, name: str) -> list[Provider]:
    """Those that know names of this form."""
    return [each for each in registry.providers("source") if not registry.resolve(each).supports(name)]


def _source(config: FrameConfig, registry: Registry, name: str, offline: bool) -> ModelSource:
    wanted = config.load.model_source
    if wanted == "auto" and not _sources(registry, name):
        noun = "file" if name.endswith(".gguf") else "folder"
        raise ConfigError(
            f"no {noun} {quoted(name)}; give the path of a checkpoint, or the name of a model (org/model)"
        )
    provider = registry.select("source", wanted, lambda kind: kind.supports(name))
    source: ModelSource = registry.make("source", provider, SourceSetup(config.load.download_dir, offline), config)
    return source
