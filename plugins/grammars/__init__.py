"""The default grammar backend."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_grammars() -> list[Provider]:
    """The grammar backends that ship with frame."""
    return [
        Provider(
            name="guidance",
            target="frame.plugins.grammars.guidance:GuidanceBackend",
            api=">=0.2.dev1,<0.3",
            summary="llguidance: JSON schemas, regular expressions, choices, Lark and GBNF grammars, structural tags.",
            preference=10,
            options="frame.plugins.grammars.guidance:GuidanceOptions",
            aliases=("llguidance",),
        )
    ]
