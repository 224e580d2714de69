"""The registry of plugins: chooses them by name, builds them, and says why one is not there.

A package that cannot be loaded is reported, and ends the start only when somebody asked for something of it. Child
processes load exactly what their parent chose.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from packaging.utils import canonicalize_name
from pydantic import BaseModel

from frame.quoting import quoted

from ..interfaces.provider import Provider
from ..interfaces.setup import Setup
from .kinds import KINDS
from .model_registry import models_here, offer_here
from .offers import (
    HERE,
    OURS,
    Choice,
    Failure,
    NoPluginError,
    Offer,
    PluginError,
    UnfitPluginError,
    collect,
    import_target,
    installed,
    offers_of_file,
    one_line,
)
from .plugin_settings import check_named, check_options, named_plugins, read_options

logger = logging.getLogger(__name__)

#: Names of a kind that an error lists; of more, the near ones.
_MAX_LISTED = 30
#: Characters of a line about a choice that holds the reasons against the others.
_MAX_LINE = 100
#: Kinds of which child processes load all, whatever the configuration names: a model may have layers that the named
#: attention backend is not for, and weights in another format than the named one; a connector may hold others.
_NEVER_ALONE = ("attention", "quantization", "connector")

__all__ = ["Choice", "PluginError", "Registry"]


class Registry:
    """What installed packages offer. Made by `load`; `choose` or `select` finds a provider, and `make` builds it."""

    def __init__(self, offers: Sequence[Offer], failures: Sequence[Failure]) -> None:
        self.offers = list(offers)
        self.failures = list(failures)
        self._resolved: dict[str, type[Any]] = {}
        self._files: set[str] = set()
        self._logged: set[str] = set()  # lines about choices, each of which is logged once

    @classmethod
    def load(cls, only: Iterable[Sequence[str]] | None = None) -> Registry:
        """Collects the providers of every installed package.

        `only` are the choices of a parent process: then it imports their packages alone, offers nothing else, and
        raises `PluginError` when one of them is missing here.
        """
        choices = None if only is None else [Choice(*choice) for choice in only]
        packages = None if choices is None else {canonicalize_name(choice.package) for choice in choices}
        offers, failures = collect(installed(packages))
        registry = cls(offers, failures)
        here, registry._resolved = models_here()
        registry.offers += here
        if choices is not None:
            registry.offers = [
                offer_here(kind, name, target) if package == HERE else registry.offer(kind, f"{package}:{name}")
                for kind, package, name, target in choices
            ]
        return registry

    def providers(self, kind: str) -> list[Provider]:
        """Returns what can be chosen of a kind, in order of preference."""
        found = [offer.provider for offer in self.offers if offer.kind == kind and offer.problem is None]
        return sorted(found, key=lambda provider: (-provider.preference, provider.name))

    def choose(self, kind: str, name: str) -> Provider:
        """Returns the provider of the offer called `name`, see `offer`."""
        return self.offer(kind, name).provider

    def offer(self, kind: str, name: str) -> Offer:
        """Returns the offer called `name` (or "package:name"); raises `PluginError` for none, or for several.

        Of models and commands that several packages offer under one name, frame's own counts.
        """
        package, _, wanted = name.rpartition(":")
        matches = [
            offer
            for offer in self.offers
            if offer.kind == kind
            and wanted in offer.names
            and (not package or canonicalize_name(offer.package) == canonicalize_name(package))
        ]
        here = [offer for offer in matches if offer.package == HERE]
        usable = here or [offer for offer in matches if offer.problem is None]
        noun = KINDS[kind].noun
        if len(usable) == 1:
            return usable[0]
        if not matches:
            raise PluginError(self._unknown(kind, name))
        if not usable:
            raise PluginError(f"{matches[0]} cannot be used: {matches[0].problem}")
        if kind in ("model", "command") and (ours := [offer for offer in usable if offer.package == OURS]):
            self._warn_of_twins(ours[0], usable)
            return ours[0]
        packages = sorted({offer.package for offer in usable})
        if len(packages) == 1:
            raise PluginError(f"{noun} {wanted!r} is offered {len(usable)} times by package {packages[0]}")
        names = ", ".join(f"'{package}:{wanted}'" for package in packages)
        raise PluginError(f"{noun} {wanted!r} is offered by {len(packages)} packages; name one of {names}")

    def select(
        self,
        kind: str,
        name: str,
        reason: Callable[[type[Any]], str | None],
        preference: Callable[[type[Any]], int | None] | None = None,
    ) -> Provider:
        """Returns the provider `name`, or for "auto" the most preferred one whose class has no `reason` against it.

        An empty reason is against one that nobody would expect to be asked: it is not named.
        `preference` may overrule a provider's own number for the case at hand. Raises `NoPluginError` with the reason
        of each candidate, or `PluginError` naming a tie.
        """
        noun = KINDS[kind].noun
        if name != "auto":
            provider = self.choose(kind, name)
            if (against := reason(self.resolve(provider))) is not None:
                raise PluginError(f"{noun} {quoted(name)} cannot be used here: {against}")
            self._log_once(logging.INFO, f"{noun}: {provider.name}")
            return provider
        able, unable = self._candidates(kind, reason, preference)
        if not able:
            reasons = "; ".join(f"{other}: {against}" for other, against in unable.items()) or "none is installed"
            raise NoPluginError(f"no {noun} can be used here; {reasons}")
        best = max(rank for rank, _ in able)
        chosen = [provider for rank, provider in able if rank == best]
        if len(chosen) > 1:
            names = " and ".join(provider.name for provider in chosen)
            raise PluginError(f"{noun}s {names} have the same preference {best}; choose one by name")
        whole = f"{noun}: {chosen[0].name} (auto{''.join(f'; not {name}: {why}' for name, why in unable.items())})"
        level = logging.INFO if unable or len(able) > 1 else logging.DEBUG
        if unable and len(whole) > _MAX_LINE:
            names, level = ", ".join(unable), logging.DEBUG
            line = f"{noun}: {chosen[0].name} (auto; {names} cannot be used, --log-level debug says why)"
            self._log_once(logging.INFO, line)
        self._log_once(level, whole)
        return chosen[0]

    def _candidates(
        self,
        kind: str,
        reason: Callable[[type[Any]], str | None],
        preference: Callable[[type[Any]], int | None] | None,
    ) -> tuple[list[tuple[int, Provider]], dict[str, str]]:
        """Returns (preference, provider) of those without a `reason` against them, and the reasons against others."""
        able: list[tuple[int, Provider]] = []
        unable: dict[str, str] = {}
        for provider in self.providers(kind):
            try:
                target = self.resolve(provider)
                against = reason(target)
            except PluginError as error:
                against = str(error)
            if against is not None:
                if against:
                    unable[provider.name] = against
                continue
            own = preference(target) if preference is not None else None
            able.append((provider.preference if own is None else own, provider))
        return able, unable

    def _warn_of_twins(self, ours: Offer, usable: Sequence[Offer]) -> None:
        """Warns that other packages offer a model or a command of the same name, and says how to choose theirs."""
        name = ours.provider.name
        for package in sorted({offer.package for offer in usable} - {OURS}):
            also = f"{KINDS[ours.kind].noun} {name!r} is also offered by package {package}"
            how = "--model-plugin" if ours.kind == "model" else "frame"
            self._log_once(logging.WARNING, f"{also}; {how} {package}:{name} takes that one")

    def _log_once(self, level: int, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.log(level, "%s", line)

    def offer_of(self, provider: Provider) -> Offer:
        """The offer that holds this very object; one of this process where no package offered it."""
        own = (offer for offer in self.offers if offer.provider is provider)
        return next(own, Offer("", provider, HERE, ""))

    def resolve(self, provider: Provider, part: str = "") -> type[Any]:
        """Imports the class that a provider names; `part` names a tag that holds another target ("worker").

        Raises `PluginError` when it cannot be imported, is no class, or lacks methods of its interface.
        """
        target = provider.tags.get(part, "") if part else provider.target
        offer = self.offer_of(provider)
        if not target:
            raise PluginError(f"{offer} names no {part} part: give tags={{{part!r}: 'package.module:Class'}}")
        if target not in self._resolved:
            self._resolved[target] = _import(offer, target, part)
        return self._resolved[target]

    def options(self, provider: Provider, config: Any) -> BaseModel | None:
        """The provider's typed options from `config.plugin[name]`; None when it has none.

        Raises `PluginError` naming the field when a value is unknown or wrong.
        """
        return read_options(self.offer_of(provider), config)

    def make(self, kind: str, name: str | Provider, setup: Setup, config: Any = None, *, part: str = "") -> Any:
        """Builds a plugin, by name or as chosen before: `Class(setup, options)`, the options as `config` sets them.

        `part` is as in `resolve`. What the constructor raises becomes a `PluginError` that names the plugin, its
        package and the cause; it is a `ValueError` too where that was one.
        """
        provider = self.choose(kind, name) if isinstance(name, str) else name
        made, options = self.resolve(provider, part), self.options(provider, config)
        offer = self.offer_of(provider)
        setup = replace(setup, plugin=offer.full_name)
        try:
            return made(setup, options)
        except PluginError:
            raise
        except Exception as error:
            cause = str(error) if isinstance(error, ValueError) else one_line(error)
            raised = UnfitPluginError if isinstance(error, ValueError) else PluginError
            raise raised(f"{offer} cannot be built: {cause}", reason=f"it cannot be built: {cause}") from error

    def check(self, config: Any) -> None:
        """Raises `PluginError` for any plugin named in `config` that is not there, or whose options are wrong.

        Imports the options of plugins, and none of their implementations.
        """
        self.add_files(config)
        check_named(self, config)
        check_options(self, config)

    def add_files(self, config: Any) -> None:
        """Adds the parsers that the files named in `config` offer; raises `PluginError`."""
        for path in (config.server.tool_parser_plugin, config.server.reasoning_parser_plugin):
            if path is not None and path not in self._files:
                self._files.add(path)
                self.offers += offers_of_file(path)

    def choices(self, config: Any) -> list[Choice]:
        """Returns what child processes may load: of most kinds the plugin that `config` names, else all.

        Raises `PluginError` where it names one that is not there.
        """
        named, found = dict(named_plugins(config)), list[Choice]()
        for kind in KINDS:
            name = named.get(kind, "auto")
            chosen = [] if name == "auto" else [self.offer(kind, name)]
            if not chosen or kind in _NEVER_ALONE:
                chosen = [offer for offer in self.offers if offer.kind == kind and offer.problem is None]
            for offer in chosen:
                target = offer.provider.target if offer.package == HERE else ""
                found.append(Choice(kind, offer.package, offer.provider.name, target))
        return found

    def _unknown(self, kind: str, name: str) -> str:
        noun, known = KINDS[kind].noun, [provider.name for provider in self.providers(kind)]
        close = difflib.get_close_matches(name.rpartition(":")[2], known, n=5, cutoff=0.5)
        shown = close if len(known) > _MAX_LISTED and close else known
        listed = f"{'near ones' if shown is close else 'there are'}: {', '.join(shown) or 'none'}"
        failed = "".join(f"; package {failure.package} failed: {failure.reason}" for failure in self.failures)
        return f"no {noun} {quoted(name)}; {listed}{failed}"


def _import(offer: Offer, target: str, part: str) -> type[Any]:
    """The class at `target`; raises `PluginError` when it is none, or is not what plugins of its kind are."""
    found = import_target(target, str(offer))
    wrong = "is no class" if not inspect.isclass(found) else _misfit(found, offer.kind, part)
    if wrong is not None:
        raise PluginError(f"{offer}: {target} {wrong}", reason=f"{target} {wrong}")
    kind: type[Any] = found
    return kind


def _misfit(found: type[Any], kind: str, part: str) -> str | None:
    interface = KINDS[kind].interface if kind else None
    if interface is None:
        return None
    module, _, name = interface.partition(":")
    if part:  # the other side of a connector: ConnectorScheduler, ConnectorWorker
        name = name.replace("Scheduler", part.capitalize())
    home = module if "." in module else f"..interfaces.{module}"
    if not issubclass(found, getattr(import_module(home, __package__), name)):
        return f"does not derive from {name}"
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    return f"lacks {', '.join(missing)}" if missing else None
