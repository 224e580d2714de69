"""What KV connectors report, put in order: by connector, tier and direction, in units that are the same for all.

Connectors give their numbers names of one word after the other, `offload_disk_read_bytes`, of which the last ones say
what is measured and the first ones who did. Names that say neither are left to the metrics `frame_kv_connector_NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from frame.core.interfaces.engine import EngineStats


class Measure(NamedTuple):
    """`name` is what is measured; `direction` is "load" (to this engine's blocks), "save" (from them), or ""."""

    name: str
    direction: str = ""


class Tier(NamedTuple):
    """Which connector, and where the blocks are that it loads from and saves to."""

    connector: str
    tier: str


#: What the last words of a counter's name say.
COUNTERS: Mapping[str, Measure] = {
    "lookup_tokens": Measure("lookup_tokens"),
    "hit_tokens": Measure("hit_tokens"),
    **dict.fromkeys(("load_bytes", "loaded_bytes", "read_bytes"), Measure("bytes", "load")),
    **dict.fromkeys(("save_bytes", "saved_bytes", "written_bytes", "sent_bytes"), Measure("bytes", "save")),
    **dict.fromkeys(("load_seconds", "loaded_seconds", "read_seconds"), Measure("seconds", "load")),
    **dict.fromkeys(("save_seconds", "saved_seconds", "written_seconds", "sent_seconds"), Measure("seconds", "save")),
    "loaded_blocks": Measure("blocks", "load"),
    "saved_blocks": Measure("blocks", "save"),
    "failed_blocks": Measure("failed_blocks", "load"),
    **dict.fromkeys(("unsaved_blocks", "lost_blocks"), Measure("failed_blocks", "save")),
}
#: What the last words of a gauge's name say.
GAUGES: Mapping[str, Measure] = {name: Measure(name) for name in ("used_bytes", "size_bytes", "held_blocks")}
#: Last words of a gauge's name that make it a share: several engines' are not added up.
SHARES = ("ratio", "share", "usage", "perc", "percent", "fraction")

#: Where the blocks of frame's connectors are. Those of others have a tier of the connector's name.
_TIERS = {
    "disk": "disk", "offload": "host", "peer": "peer", "nixl": "engine", "push": "engine", "mooncake": "engine",
}  # fmt: skip
#: Words between connector and measure that name a tier.
_PLACES = ("host", "disk", "shared", "checked", "buffer")
_TWIN = re.compile(r"_\d+$")


def by_tier(stats: EngineStats) -> dict[Tier, dict[Measure, float]]:
    """The numbers of one engine's connector; two names that say the same are added up."""
    found: dict[Tier, dict[Measure, float]] = {}
    for numbers, known in ((stats.connector_counters, COUNTERS), (stats.connector_gauges, GAUGES)):
        for name, value in numbers.items():
            first, _, _ = name.rpartition("_")
            owner, _, unit = first.rpartition("_")
            measure = known.get(name[len(owner) + 1 :] if owner else "")
            if measure is not None and unit:
                values = found.setdefault(_tier(owner), {})
                values[measure] = values.get(measure, 0.0) + value
    return found


def rows_by_tier(stats: EngineStats) -> list[dict[str, str | float]]:
    """The same as rows for people: the measures of a direction are named `load_bytes`, `save_seconds` and so on."""
    return [
        {
            **tier._asdict(),
            **{"_".join(filter(None, (one.direction, one.name))): value for one, value in values.items()},
        }
        for tier, values in by_tier(stats).items()
    ]


def is_share(gauge: str) -> bool:
    """Whether a gauge of this name is a part of a whole, by its last word."""
    return gauge.rpartition("_")[2] in SHARES


def _tier(owner: str) -> Tier:
    connector, _, place = owner.rpartition("_")
    if connector and place in _PLACES:
        return Tier(connector, place)
    name = _TWIN.sub("", owner)
    return Tier(owner, _TIERS.get(name, name))
