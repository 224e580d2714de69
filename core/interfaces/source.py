"""A model source: fetches the files of a checkpoint that a user names instead of giving a folder.

A source is used before an engine starts; everything after that sees the folder only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .setup import SourceSetup


class ModelSource(ABC):
    """Built as `Class(setup, options)` by the process that a user starts, before it starts others or imports torch."""

    def __init__(self, setup: SourceSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @classmethod
    @abstractmethod
    def supports(cls, name: str) -> str | None:
        """None when a model here may be called `name`, else why not. Judges the form alone; never raises."""

    @abstractmethod
    def fetch(self, name: str, revision: str | None, *, weights: bool) -> Path:
        """Fetches a model's files that are not there yet, and returns the folder of the checkpoint.

        The folder keeps its content while engines read it, also when `revision` (None: the newest) means something else
        later. Without `weights`, only the configuration and the tokenizer are needed. With `setup.offline` nothing is
        fetched. Raises `frame.settings.ConfigError`, one sentence that names the model and says what to do.
        """
