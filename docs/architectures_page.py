"""The page of architectures: what each family is, has, is divided by, and is compared with."""

from __future__ import annotations

from pathlib import Path

from tables import our_providers, table

from frame.plugins.models.families import FAMILIES

#: What `python -m tests.models.native` found of the model of each architecture, in columns.
FOUND = Path(__file__).parent / "data" / "families.tsv"


def page() -> str:
    """One table for each kind of families."""
    found = dict(line.split("\t", 1) for line in FOUND.read_text(encoding="utf-8").splitlines())
    summaries = {provider.name: provider.summary for provider in our_providers("model")}
    parts = ["# Architectures", *_about()]
    for kind, rows in FAMILIES.items():
        cells = [(f"`{name}`", summaries[name], *found[name].split("\t")) for name in rows]
        head = ("architecture", "family", "traits", "ranks", "compared with")
        parts += [f"## {kind.capitalize()}", table(head, cells)]
    return "\n\n".join(parts)


def _about() -> tuple[str, ...]:
    formats = "; ".join(f"`{one.name}` ({one.summary})" for one in our_providers("quantization"))
    return (
        "The names that `architectures` in config.json may hold; packages add more. What is not here is run by "
        "[transformers' class](../models.md#any-other-architecture).",
        "Ranks may divide heads and columns (tensor), layers (pipeline) and whole experts (experts). Traits are those "
        "of tiny random checkpoints, whose logits (of encoders: vectors and scores) are compared on a CPU with those "
        'of transformers, or of a reference in float32 that the tests have. "As" another: a synonym, or its text '
        "part. `make test` runs one family for each trait over batches, chunked prompts, cached prefixes, preemption "
        "and two ranks, `make matrix` all.",
        "Quantised weights are a matter of the layers that families are built of, not of families. Tests compare "
        "formats with their dequantised twins for `LlamaForCausalLM`, and those made while weights load for "
        f"`Qwen3MoeForCausalLM` too. There are: {formats}.",
    )
