"""The settings of a tokenizer's `tokenizer_config.json` as plain JSON, for answers over HTTP.

Leaves out settings that tell something about this machine. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Settings that name the place from which it was loaded.
_LOCAL = frozenset(("name_or_path", "is_local", "local_files_only", "cache_dir", "backend", "token", "use_auth_token"))
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_MAX_DEPTH = 16
#: Stands for a value that JSON does not have.
_NOTHING = object()


def tokenizer_info(hf: Any, chat_template: str | None) -> dict[str, Any]:
    """The settings of a transformers tokenizer; `chat_template` is the one that chats get instead of its own."""
    settings = {name: value for name, value in hf.init_kwargs.items() if name not in _LOCAL and "file" not in name}
    settings["tokenizer_class"] = type(hf).__name__
    settings["chat_template"] = chat_template if chat_template is not None else hf.chat_template
    plain: dict[str, Any] = _plain(settings, _MAX_DEPTH)
    return plain


def _plain(value: Any, depth: int) -> Any:
    """The value as JSON: added tokens become objects, values without a JSON form are left out."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth == 0:
        return _NOTHING
    if isinstance(value, Mapping):
        found = {str(name): _plain(item, depth - 1) for name, item in value.items()}
        return {name: item for name, item in found.items() if item is not _NOTHING}
    if isinstance(value, (list, tuple)):
        return [item for item in (_plain(item, depth - 1) for item in value) if item is not _NOTHING]
    if all(hasattr(value, name) for name in _TOKEN_FIELDS):
        return {name: getattr(value, name) for name in _TOKEN_FIELDS}
    return _NOTHING
