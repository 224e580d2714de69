"""The contract suite of each kind of plugin: pytest classes for plugin authors, also run by `frame plugins check`.

A suite is subclassed with `plugin = "package:name"` (or "name") naming the provider under test; it gets the class and
its options through the registry. Knows no plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: Kind → suite, for the kinds that have one.
SUITES: Mapping[str, type[Any]] = MappingProxyType({})
