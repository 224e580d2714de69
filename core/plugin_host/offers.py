"""What installed packages offer, read from their entry points one by one.

A package that cannot be loaded becomes a `Failure` and does not affect others. The registry chooses among offers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from ..config.errors import near
from ..interfaces.provider import API_VERSION, NEXT_MINOR, PluginError as PluginError, Provider
from .kinds import GROUP, HOOKS, KINDS

logger = logging.getLogger(__name__)

#: The package name of plugins that this process registered, or read from a file.
HERE = "this-process"
#: The package name of frame itself.
OURS = "frame-llm"


class NoPluginError(PluginError):
    """No plugin of a kind serves the case at hand."""


class UnfitPluginError(PluginError, ValueError):
    """A plugin that cannot do what is asked of it here: its constructor said so by a `ValueError`."""


_KIND_OF_HOOK = {kind.hook: name for name, kind in KINDS.items()}


class Choice(NamedTuple):
    """A plugin that a parent process chose, sent to child processes as JSON. `target` if no package offers it."""

    kind: str
    package: str
    name: str
    target: str = ""


@dataclass(frozen=True)
class Offer:
    """A provider and the package that offers it. `problem` says why it cannot be chosen; None when it can."""

    kind: str
    provider: Provider
    package: str
    version: str
    problem: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which the plugin is found, its own first."""
        return (self.provider.name, *self.provider.aliases)

    @property
    def full_name(self) -> str:
        """The plugin's name with its package, by which it can be chosen whoever else has the name."""
        return f"{self.package}:{self.provider.name}"

    def __str__(self) -> str:
        noun = KINDS[self.kind].noun if self.kind else "plugin"
        return f"{noun} {self.provider.name!r} of package {self.package}"


@dataclass(frozen=True)
class Failure:
    """An entry point that offers nothing, and why."""

    package: str
    version: str
    entry: str
    reason: str


def installed(packages: set[Any] | None) -> list[EntryPoint]:
    """Returns the entry points of frame's group, sorted; each once, even if stale metadata repeats it.

    `packages` are the names of the packages to look at; None for all.
    """
    found: dict[tuple[str, str, str], EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        package = canonicalize_name(_package(entry)[0])
        if packages is None or package in packages:
            found.setdefault((package, entry.name, entry.value), entry)
    return [found[key] for key in sorted(found)]


def _package(entry: EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("unknown", "0")


def collect(entries: Iterable[EntryPoint]) -> tuple[list[Offer], list[Failure]]:
    """Imports the module of each entry point and calls its hooks; one that fails does not affect the others."""
    offers: list[Offer] = []
    failures: list[Failure] = []
    for entry in entries:
        package, version = _package(entry)
        try:
            module = entry.load()
            if not any(name.startswith("frame_") for name in dir(module)):
                is_folder = getattr(module, "__file__", "") is None  # which Python imports as an empty package
                reason = "is a folder without __init__.py" if is_folder else "has no hook of frame"
                raise PluginError(f"{entry.value} {reason}, so that it offers nothing")
            offers += _offers(module, package, version)
        except (Exception, SystemExit) as error:  # a foreign module may raise anything; it is reported by name
            failures.append(Failure(package, version, entry.name, one_line(error)))
            logger.debug("plugin %s of package %s failed", entry.name, package, exc_info=True)
    return offers, failures


def _offers(plugin: ModuleType, package: str, version: str) -> list[Offer]:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HOOKS)
    manager.register(plugin)
    found: list[Offer] = []
    for caller in manager.get_hookcallers(plugin) or ():
        kind = _KIND_OF_HOOK.get(caller.name)
        if kind is None:
            raise PluginError(f"no hook {caller.name!r}{near(caller.name, _KIND_OF_HOOK)}")
        for providers in caller():
            if not isinstance(providers, list) or any(not isinstance(item, Provider) for item in providers):
                raise PluginError(f"hook {caller.name} must return a list of Provider, got {providers!r:.80}")
            found += [Offer(kind, provider, package, version, _api_problem(provider)) for provider in providers]
    return found


def offers_of_file(name: str) -> list[Offer]:
    """Returns what the hooks of a Python file offer. Its module has the file's name, so that targets can name it.

    Raises `PluginError` when the file cannot be read, fails, or has the name of another module.
    """
    path = Path(name).expanduser().absolute()
    owner = f"plugin file {name!r}"
    if not path.is_file() or not path.stem.isidentifier():
        raise PluginError(f"{owner} must be an existing Python file whose name is an identifier")
    module = sys.modules.get(path.stem)
    is_free = getattr(module, "__file__", None) == str(path) if module is not None else find_spec(path.stem) is None
    spec = spec_from_file_location(path.stem, path)
    if not is_free or spec is None or spec.loader is None:
        raise PluginError(f"{owner} has the name of an installed module or is no Python file; rename it")
    if module is None:
        module = sys.modules[path.stem] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a foreign module may raise anything
            del sys.modules[path.stem]
            raise PluginError(f"{owner} cannot be imported: {one_line(error)}") from error
    found = _offers(module, HERE, "")
    if not found:
        raise PluginError(f"{owner} offers nothing; it needs a hook such as frame_tool_parsers")
    return found


def _api_problem(provider: Provider) -> str | None:
    """Why a provider cannot be chosen by the versions that its API range has; None when it can."""
    try:
        if not isinstance(provider.api, str) or not provider.api.strip():
            raise InvalidSpecifier
        asked = SpecifierSet(provider.api, prereleases=True)
    except InvalidSpecifier:
        return f"its API range {provider.api!r} is no version range; write one like '>=0.2,<0.3'"
    if API_VERSION not in asked:
        return (
            f"it was written for plugin API {provider.api}, this frame has {API_VERSION}; "
            "install a version of the package made for it; its author finds what changed in docs/plugins/migrating.md"
        )
    if NEXT_MINOR in asked:  # which may change anything
        return (
            f"its API range {provider.api!r} goes past {NEXT_MINOR}, whatever that changes; its author must end it "
            f"there: '>={API_VERSION},<{NEXT_MINOR}'"
        )
    return None


def import_target(target: str, owner: str) -> Any:
    """The object that "package.module:Name" names; `owner` is who asks for it, in errors. Raises `PluginError`."""
    module, colon, path = target.partition(":")
    if not colon or not module or not path:
        reason = f"target {target!r} is not of the form 'package.module:Class'"
        raise PluginError(f"{owner}: {reason}", reason=reason)
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a foreign module raises while it is imported
        reason = f"cannot be imported from {target}: {one_line(error)}"
        raise PluginError(f"{owner} {reason}", reason=f"it {reason}") from error
    return found


def one_line(error: BaseException) -> str:
    """The message of an error in one line, after the name of its class where that is not frame's own."""
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"
