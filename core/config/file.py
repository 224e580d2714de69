"""A YAML file of settings: flat names (dashes or underscores), or grouped by section, and `plugin`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frame.quoting import quoted, shortened

from .errors import ConfigError, near
from .flat import known_names
from .leaves import leaves, sections


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Returns the settings of a file by name. Raises `ConfigError` naming the file and what is wrong in it."""
    flat: dict[str, Any] = {}
    for key, value in _read(Path(path)).items():
        section = str(key).replace("-", "_")
        grouped = section in sections() and isinstance(value, Mapping)
        for inner, setting in value.items() if grouped else [(key, value)]:
            name = str(inner).replace("-", "_")
            if name not in known_names():
                where = f" in {quoted(key)}" if grouped else ""
                raise ConfigError(f"{shortened(path)}: no setting {quoted(inner)}{where}{near(name, known_names())}")
            if grouped and (name not in leaves() or leaves()[name].section != section):
                raise ConfigError(f"{shortened(path)}: setting {quoted(name)} does not belong to {quoted(section)}")
            if name in flat:
                raise ConfigError(f"{shortened(path)}: {name} is set twice")
            flat[name] = setting
    return flat


def _read(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"configuration file {shortened(path)} cannot be read: {cause}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(path, node)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{shortened(path)} is not valid YAML: {_fault(error)}") from None
    except RecursionError:
        raise ConfigError(f"{shortened(path)} nests too deep, or refers to itself") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{shortened(path)} must hold settings by name, got {type(content).__name__}")
    return content


def _fault(error: Exception) -> str:
    """Returns what PyYAML found and where, without its excerpt of several lines."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {f'{context}: ' if context else ''}{problem}"


def _refuse_duplicates(path: Path, node: Any) -> None:
    """Refuses a setting that is given twice; YAML would keep the last one silently."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if str(key.value) in seen:
            raise ConfigError(f"{shortened(path)}: {key.value} is set twice (line {key.start_mark.line + 1})")
        seen.add(str(key.value))
        _refuse_duplicates(path, value)
