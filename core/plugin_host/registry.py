"""The plugin host: chooses plugins by name, builds them, and says why something is not there.

Loading is forgiving and choosing is strict: a package that cannot be loaded is reported, and stops the start only when
something of it was asked for. Child processes load exactly what their parent chose. Knows kinds, names and versions;
nothing of what a plugin does.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

from packaging.utils import canonicalize_name
from pydantic import BaseModel

from ..interfaces.provider import API_VERSION, Provider
from ..interfaces.setup import Setup
from .offers import (
    HERE,
    KINDS,
    OURS,
    Choice,
    Failure,
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

__all__ = ["Choice", "ModelRegistry", "PluginError", "Registry"]


class ModelRegistry:
    """Models of this process, for callers without a package of their own. Later registrations replace earlier ones."""

    models: ClassVar[dict[str, str | type[Any]]] = {}

    @classmethod
    def register_model(cls, architecture: str, model: str | type[Any]) -> None:
        """Makes `model` (a class, or "package.module:Class") what config.json's `architecture` means.

        A class works in this process only; a name also in engine processes.
        """
        if isinstance(model, str) and model.count(":") != 1:
            raise ValueError(f"model of {architecture!r} must be a class or 'package.module:Class', got {model!r}")
        cls.models[architecture] = model

    @classmethod
    def get_supported_archs(cls) -> list[str]:
        """Architectures that can be served: those registered here and those that plugins offer."""
        return sorted({provider.name for provider in Registry.load().providers("model")})


class Registry:
    """What is installed. Made by `load`; asked with `choose`, `select`, `options`, `resolve`, `make`."""

    def __init__(self, offers: Sequence[Offer], failures: Sequence[Failure]) -> None:
        self.offers = list(offers)
        self.failures = list(failures)
        self._resolved: dict[str, type[Any]] = {}
        self._files: set[str] = set()
        self._told: set[str] = set()  # lines about what was selected

    @classmethod
    def load(cls, only: Iterable[Sequence[str]] | None = None) -> Registry:
        """Collects the providers of every installed package.

        With `only`, the choices of a parent process: imports their packages alone, offers nothing else, and raises
        `PluginError` when one of them is missing here.
        """
        choices = None if only is None else [Choice(*choice) for choice in only]
        packages = None if choices is None else {canonicalize_name(choice.package) for choice in choices}
        offers, failures = collect(installed(packages))
        registry = cls(offers, failures)
        registry._add_models_of_this_process()
        if choices is not None:
            registry.offers = [registry._offer_of_choice(choice) for choice in choices]
        return registry

    def providers(self, kind: str) -> list[Provider]:
        """What can be chosen of a kind, most preferred first."""
        found = [offer.provider for offer in self.offers if offer.kind == kind and offer.problem is None]
        return sorted(found, key=lambda provider: (-provider.preference, provider.name))

    def choose(self, kind: str, name: str) -> Provider:
        """The provider called `name` (or "package:name"); raises `PluginError`."""
        return self.offer(kind, name).provider

    def offer(self, kind: str, name: str) -> Offer:
        """As `choose`, with the package that offers it."""
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
        if kind == "model" and (ours := [offer for offer in usable if offer.package == OURS]):
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
        """`name`, or for "auto" the most preferred provider whose class has no `reason` against it.

        `preference` may overrule a provider's own number for the case at hand. Raises `PluginError` with the reason of
        each candidate, or naming a tie.
        """
        noun = KINDS[kind].noun
        if name != "auto":
            provider = self.choose(kind, name)
            against = reason(self.resolve(provider))
            if against is not None:
                raise PluginError(f"{noun} {name!r} cannot be used here: {against}")
            self._tell(noun, provider.name)
            return provider
        able: list[tuple[int, Provider]] = []
        unable: dict[str, str] = {}
        for provider in self.providers(kind):
            try:
                target = self.resolve(provider)
                against = reason(target)
            except PluginError as error:
                against = str(error)
            if against is not None:
                unable[provider.name] = against
                continue
            own = preference(target) if preference is not None else None
            able.append((provider.preference if own is None else own, provider))
        if not able:
            reasons = "; ".join(f"{other}: {against}" for other, against in unable.items()) or "none is installed"
            raise PluginError(f"no {noun} can be used here; {reasons}")
        best = max(rank for rank, _ in able)
        names = [provider.name for rank, provider in able if rank == best]
        if len(names) > 1:
            raise PluginError(f"{noun}s {' and '.join(names)} have the same preference {best}; choose one by name")
        provider = next(provider for rank, provider in able if rank == best)
        self._tell(noun, provider.name, unable, level=logging.INFO if len(able) + len(unable) > 1 else logging.DEBUG)
        return provider

    def _warn_of_twins(self, ours: Offer, usable: Sequence[Offer]) -> None:
        """Says that a name which a checkpoint states, and nobody typed, is offered by other packages too."""
        name = ours.provider.name
        for package in sorted({offer.package for offer in usable} - {OURS}):
            line = (
                f"model {name!r} is also offered by package {package}; --model-plugin {package}:{name} takes that one"
            )
            if line not in self._told:
                self._told.add(line)
                logger.warning("%s", line)

    def _tell(
        self, noun: str, name: str, unable: Mapping[str, str] | None = None, *, level: int = logging.INFO
    ) -> None:
        """Logs what was selected, each line once: who cannot be used, and at DEBUG all of the reasons."""
        short = whole = f"{noun}: {name}"
        if unable is not None:
            reasons = "".join(f"; not {other}: {against}" for other, against in unable.items())
            short = whole = f"{short} (auto{reasons})"
        if unable and len(whole) > _MAX_LINE:
            short = f"{noun}: {name} (auto; {', '.join(unable)} cannot be used, --log-level debug says why)"
        for at, line in ((level, short), (logging.DEBUG, whole)):
            if line not in self._told:
                self._told.add(line)
                logger.log(at, "%s", line)

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
        self.check_workers(config.executor)

    def check_workers(self, executor: Any) -> None:
        """Raises `PluginError` where the settings `executor` ask for more than one worker."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(executor, name) > 1:  # each worker would load the whole model, whatever the executor can do
                raise PluginError(
                    f"{name} {getattr(executor, name)}: this version of frame runs a model on one device; set {name} "
                    "to 1, and choose a model that fits there (`frame doctor MODEL` predicts whether it does)"
                )

    def add_files(self, config: Any) -> None:
        """Adds what the files of parsers that `config` names offer; raises `PluginError`."""
        for path in (config.server.tool_parser_plugin, config.server.reasoning_parser_plugin):
            if path is not None and path not in self._files:
                self._files.add(path)
                self.offers += offers_of_file(path)

    def choices(self, config: Any) -> list[Choice]:
        """What child processes of an engine with `config` may load: what it names, and all of what it leaves open."""
        named = dict(named_plugins(config))
        return [
            choice
            for kind in KINDS
            for choice in (
                [self._choice(self.offer(kind, named[kind]))]
                if named.get(kind, "auto") != "auto"
                else [self._choice(offer) for offer in self.offers if offer.kind == kind and offer.problem is None]
            )
        ]

    def _choice(self, offer: Offer) -> Choice:
        target = offer.provider.target if offer.package == HERE else ""
        return Choice(offer.kind, offer.package, offer.provider.name, target)

    def _offer_of_choice(self, choice: Choice) -> Offer:
        if choice.package == HERE:
            return Offer(choice.kind, _provider_here(choice.name, choice.target), HERE, "")
        return self.offer(choice.kind, f"{choice.package}:{choice.name}")

    def _add_models_of_this_process(self) -> None:
        for architecture, model in ModelRegistry.models.items():
            target = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
            if not isinstance(model, str):
                self._resolved[target] = model
            self.offers.append(Offer("model", _provider_here(architecture, target), HERE, ""))

    def _unknown(self, kind: str, name: str) -> str:
        noun, wanted = KINDS[kind].noun, name.rpartition(":")[2]
        known = [provider.name for provider in self.providers(kind)]
        close = difflib.get_close_matches(wanted, known, n=5, cutoff=0.5)
        listed = (
            f"near ones: {', '.join(close)}"
            if close and len(known) > _MAX_LISTED
            else f"there are: {', '.join(known) or 'none'}"
        )
        failed = "".join(f"; package {failure.package} failed: {failure.reason}" for failure in self.failures)
        return f"no {noun} {name!r}; {listed}{failed}"


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
    if part:
        name = name.replace("Scheduler", part.capitalize())
    if not issubclass(found, getattr(import_module(f"..interfaces.{module}", __package__), name)):
        return f"does not derive from {name}"
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    return f"lacks {', '.join(missing)}" if missing else None


def _provider_here(architecture: str, target: str) -> Provider:
    return Provider(architecture, target, api=f"=={API_VERSION}", summary="registered in this process")
