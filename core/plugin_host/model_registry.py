"""Models that a program registers in its own process, without a package that offers them."""

from __future__ import annotations

from typing import Any, ClassVar

from ..interfaces.provider import API_VERSION, Provider
from .offers import HERE, Offer


class ModelRegistry:
    """Models of this process by architecture. A later registration replaces an earlier one of the same name."""

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
        """Returns the architectures that can be served: those registered here and those that plugins offer."""
        from .registry import Registry

        names = {provider.name for provider in Registry.load().providers("model")}
        return sorted(name for name in names if not name.startswith("*"))


def models_here() -> tuple[list[Offer], dict[str, type[Any]]]:
    """Returns the registered models as offers, and the classes among them by their targets."""
    offers, classes = list[Offer](), dict[str, type[Any]]()
    for architecture, model in ModelRegistry.models.items():
        target = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
        if not isinstance(model, str):
            classes[target] = model
        offers.append(offer_here("model", architecture, target))
    return offers, classes


def offer_here(kind: str, name: str, target: str) -> Offer:
    """Returns the offer of a plugin that no package offers."""
    return Offer(kind, Provider(name, target, api=f"=={API_VERSION}", summary="registered in this process"), HERE, "")
