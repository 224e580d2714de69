"""The speculators that ship with frame."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_speculators() -> list[Provider]:
    """Speculators that propose tokens from the request's own text."""
    here = "frame.plugins.speculators.ngram"
    return [
        Provider(
            "ngram",
            f"{here}:NgramSpeculator",
            api=">=0.2.dev1,<0.3",
            summary="repeats what followed the newest tokens earlier in the request (prompt lookup)",
            options=f"{here}_options:NgramOptions",
            # the options with which `frame plugins check` runs it
            tags={"options": '{"prompt_lookup_max": 3}'},
        )
    ]
