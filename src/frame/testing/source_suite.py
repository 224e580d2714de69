"""The contract of model sources: names are judged without a network, and what cannot be had is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from frame.core.config.errors import ConfigError
from frame.core.interfaces.source import ModelSource

from .plugin_suite import PluginSuite, reason_or_none

_ABSENT = ("frame-tests/absent", "absent", "s3://frame-tests/absent", "https://frame-tests.invalid/absent")
_ODD = ("", " ", ".", "../x", "/x", "a/b/c", "a\nb", "\x00", "µ/é", "\ud800", "a" * 10_000)


class ModelSourceSuite(PluginSuite):
    """The contract of `frame.interfaces.ModelSource`.

        class TestMine(ModelSourceSuite):
            plugin = "mine"                  # or target = "package.module:Class"
            model = "mine://a/model"         # one that can be fetched where the tests run
            absent = "mine://no/model"       # a name that the source supports, of a model that is nowhere

    Without `model` nothing is fetched. Models are kept in a folder of the test.
    """

    kind = "source"
    model: ClassVar[str] = ""
    absent: ClassVar[str] = ""

    def source(self, *, offline: bool) -> ModelSource:
        """A new source, which keeps models in a folder of the test."""
        made = self.make(download_dir=str(self.scratch("models")), offline=offline)
        assert isinstance(made, ModelSource), f"{type(made).__name__} does not derive from ModelSource"
        return made

    @pytest.mark.parametrize("name", [*_ABSENT, *_ODD], ids=ascii)
    def test_supports_gives_reasons_and_never_raises(self, name: str) -> None:
        reason_or_none(self.found().supports(name), "supports")

    @pytest.mark.parametrize("weights", [True, False])
    def test_what_was_never_fetched_is_one_sentence_when_offline(self, weights: bool) -> None:
        names = [name for name in (self.absent, *_ABSENT) if name and self.found().supports(name) is None]
        if not names:
            pytest.skip("it supports none of the names that were tried; set `absent`")
        with pytest.raises(ConfigError) as caught:
            self.source(offline=True).fetch(names[0], None, weights=weights)
        text = str(caught.value)
        assert names[0] in text, f"the error does not name the model {names[0]!r}: {text}"
        assert "\n" not in text, f"the error is more than one line: {text}"

    def test_a_model_stays_where_it_was_fetched(self) -> None:
        if not self.model:
            pytest.skip("no model is named that could be fetched; set `model`")
        assert self.found().supports(self.model) is None
        folder = self.source(offline=False).fetch(self.model, None, weights=True)
        assert isinstance(folder, Path), f"fetch must return a Path, gave {folder!r}"
        assert (folder / "config.json").is_file(), f"there is no config.json in {folder}"
        assert self.source(offline=True).fetch(self.model, None, weights=True) == folder
