"""The default poolers: a row for a sequence, or a row for each of its tokens."""

from __future__ import annotations

from frame import Provider, hookimpl


@hookimpl
def frame_poolers() -> list[Provider]:
    """The default poolers; vLLM's names in capitals are aliases."""
    here = "frame.plugins.poolers"
    rows = (
        ("cls", "sequence:ClsPooler", "the first token's hidden state"),
        ("last", "sequence:LastPooler", "the last token's"),
        ("mean", "sequence:MeanPooler", "the mean over all tokens"),
        ("all", "tokens:AllPooler", "a row for each token"),
        ("step", "tokens:StepPooler", "a row for each token that ends a step (step_tag_id)"),
    )
    return [
        Provider(name, f"{here}.{target}", api=">=0.2.dev1,<0.3", summary=summary, aliases=(name.upper(),))
        for name, target, summary in rows
    ]
