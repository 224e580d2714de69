"""What every contract suite shares: which plugin is under test, its configuration, and how it is built.

Knows no kind of plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from pydantic import BaseModel

from frame.core.config.flat import from_flat
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.provider import API_VERSION, Provider
from frame.core.plugin_host.offers import HERE, Offer, import_target
from frame.core.plugin_host.registry import Registry

from .setups import make_setup

#: The name under which a class that no package offers is put into the registry.
UNDER_TEST = "under-test"


class PluginSuite:
    """A suite is subclassed in a test module; the subclass says what is under test in one of two ways.

    `plugin` names an installed provider ("name" or "package:name"). `target` names a class that no package offers yet
    ("package.module:Class"), `tags` and `options_model` stand for the rest of its `Provider`. `options` are the
    plugin's own settings; those of type `Path` that are not given get an empty folder of the test. `settings` are
    settings of frame, as `LLM` takes them.
    """

    kind: ClassVar[str] = ""
    plugin: ClassVar[str] = ""
    target: ClassVar[str] = ""
    tags: ClassVar[Mapping[str, str]] = {}
    options_model: ClassVar[str | type[BaseModel] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}

    #: a folder that only the running test uses
    folder: Path
    #: what `registry` gives
    _found: ClassVar[Registry]

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @property
    def name(self) -> str:
        """The name by which the configuration chooses the plugin."""
        if not (self.plugin or self.target):
            pytest.fail(f"{type(self).__name__} must set `plugin` (an installed name) or `target` ('module:Class')")
        return self.plugin or UNDER_TEST

    @property
    def bare_name(self) -> str:
        """The provider's name, without its package."""
        return self.name.rpartition(":")[2]

    def registry(self) -> Registry:
        """The installed plugins and the class under test; loaded once a suite, since every test asks several times."""
        if "_found" not in vars(type(self)):
            registry = Registry.load()
            if not self.plugin:
                provider = Provider(
                    self.name, self.target, api=f"=={API_VERSION}", options=self.options_model, tags=dict(self.tags)
                )
                registry.offers.append(Offer(self.kind, provider, HERE, ""))
            type(self)._found = registry
        return type(self)._found

    def provider(self) -> Provider:
        """The description of the plugin under test."""
        return self.registry().choose(self.kind, self.name)

    def found(self, part: str = "") -> type[Any]:
        """The class under test; `part` names one of its tags."""
        return self.registry().resolve(self.provider(), part)

    def config(self, **settings: Any) -> FrameConfig:
        """The configuration of a test: the suite's settings, then the test's, with the plugin's options."""
        options = {**self.scratch_options(), **self.options}
        plugin = {self.provider().name: options} if options else {}
        return from_flat({"num_threads": 1, **self.settings, **settings, "plugin": plugin})

    def scratch_options(self) -> dict[str, Any]:
        """Options of type `Path` that are not given, each with an empty folder of this test."""
        model = self.provider().options
        if isinstance(model, str):
            model = import_target(model, f"options of plugin {self.name!r}")
        if model is None or not issubclass(model, BaseModel):
            return {}
        names = [name for name, field in model.model_fields.items() if _is_path(field.annotation)]
        return {name: str(self.scratch(name)) for name in names}

    def scratch(self, name: str) -> Path:
        """A folder of this test, by name; the same for every call."""
        folder = self.folder / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def make(self, *, config: FrameConfig | None = None, part: str = "", **changes: Any) -> Any:
        """Builds the plugin as frame does: `Class(setup, options)`. Override to build it by hand.

        `changes` are fields of the setup, see `make_setup`; `part` asks for the class that a tag names.
        """
        config = self.config() if config is None else config
        setup = make_setup(self.kind, part=part, config=config, **changes)
        return self.registry().make(self.kind, self.name, setup, config, part=part)


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(_is_path(part) for part in get_args(annotation))


def reason_or_none(answer: Any, what: str) -> str | None:
    """Checks that an answer of the kind "None, or why not" is one line of text or None, and returns it."""
    if answer is not None:
        assert isinstance(answer, str), f"{what} must give None or a reason, gave {answer!r}"
        assert answer.strip(), f"{what} must give None or a reason, gave an empty text"
        assert "\n" not in answer, f"{what} must give its reasons in one line, joined by '; ', gave {answer!r}"
        return answer
    return None
