"""Handles plugins that fail: leaves out those that nobody named, and finds the plugin in which an error arose."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..interfaces.provider import Provider
from .offers import HERE, OURS, PluginError, one_line
from .registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")


def run_or_leave_out(registry: Registry, provider: Provider, work: Callable[[], T], *, named: bool) -> T | None:
    """Calls `work`, which builds or uses the plugin of `provider`, and returns its result.

    When `work` raises, the plugin is left out: the cause is logged, nobody can choose the plugin any more, and the
    result is None. For a plugin that the user `named`, and for frame's own, the error is raised.
    """
    try:
        return work()
    except (Exception, SystemExit) as error:  # a foreign class may raise anything
        offer = registry.offer_of(provider)
        if offer.package in (HERE, OURS) or (named and isinstance(error, PluginError)):
            raise
        reason = error.reason if isinstance(error, PluginError) else one_line(error)
        if named:
            raise PluginError(f"{offer} cannot be built: {reason}") from error
        registry.offers[registry.offers.index(offer)] = replace(offer, problem=reason)
        logger.warning("%s is left out: %s", offer, reason)
        logger.debug("%s failed", offer, exc_info=error)
        return None


def is_configured(provider: Provider, config: Any) -> bool:
    """Whether the configuration names a plugin by giving it options."""
    return any(name in config.plugin for name in (provider.name, *provider.aliases))


def culprit(registry: Registry, error: BaseException) -> str:
    """Returns the plugin of another package in which an error arose ("logits processor 'x' of package y"), or "".

    An error that came from another process has the answer as its attribute `culprit`.
    """
    sent = getattr(error, "culprit", None)
    if sent is not None:
        return str(sent)
    step, found = error.__traceback__, ""
    while step is not None:
        # the innermost frame of a plugin counts: the frames below it may be torch's or frame's
        found = _owner(registry, str(step.tb_frame.f_globals.get("__name__", ""))) or found
        step = step.tb_next
    return found


def _owner(registry: Registry, module: str) -> str:
    """Returns the plugin that `module` holds, else the package of plugins that it belongs to, else ""."""
    beside = ""
    for offer in registry.offers:
        if offer.package in (HERE, OURS):
            continue
        homes = [target.partition(":")[0] for target in (offer.provider.target, *offer.provider.tags.values())]
        if module in homes:
            return str(offer)
        if module.partition(".")[0] == homes[0].partition(".")[0]:
            beside = f"package {offer.package}"
    return beside
