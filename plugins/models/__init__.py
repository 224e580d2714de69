"""The default models, by the architecture that config.json states. Adding a family is one file here and one row.

`families.py` is the table of all. What a family's file is made of lies beside it:

- the model around layers, and layers: `decoder.py` (RMSNorm, a residual that norms add), `classic.py` (LayerNorm),
  `encoder.py`, `encoder_decoder.py` (both sides), `hybrid.py` (states beside attention);
- families as data: `dense.py`, Llama but for the `Traits` of each layer, with its norms in `norms.py`, its positions in
  `positions.py` and its many families in `llama_variants.py` and `normed_heads.py`;
- feed-forward parts: `activations.py`, `plain_mlp.py` (without a gate), `mixture.py` (routed experts);
- attention: `latent.py`, `shared_keys.py` (layers that read another's cache), `head_norms.py`, `added_positions.py`
  (learned, sines, ALiBi).

Every other file is a family, by the name that transformers gives it. `wrapped/` runs any class of transformers, and
`demo/` is a tiny model.
"""

from __future__ import annotations

import json

from frame import Provider, hookimpl

from .families import CONFIGS, FAMILIES

#: Models of any architecture that transformers has a class for; the first that supports it is taken.
_WRAPPED = (
    ("*", "decoder:WrappedDecoder", "any class of transformers that generates, over frame's cache"),
    ("*encoder", "encoder:WrappedEncoder", "any class of transformers that embeds, as BERT does"),
    ("*classifier", "encoder:WrappedClassifier", "any class of transformers that scores texts, as BERT does"),
    (
        "*recomputed",
        "recomputed:RecomputedDecoder",
        "any other that generates, each request computed anew in each step",
    ),
)


@hookimpl
def frame_models() -> list[Provider]:
    """One provider an architecture, and those for any."""
    native = [_native(name, *row) for rows in FAMILIES.values() for name, row in rows.items()]
    wrapped = [
        Provider(
            name, f"frame.plugins.models.wrapped.{target}", api=">=0.2.dev39,<0.3", summary=summary, preference=-rank
        )
        for rank, (name, target, summary) in enumerate(_WRAPPED, 1)
    ]
    return native + wrapped


def _native(name: str, home: str, summary: str) -> Provider:
    target = home if ":" in home else f"{home}:{name}"
    tags = {"config": json.dumps(CONFIGS[name])} if name in CONFIGS else {}
    return Provider(name, f"frame.plugins.models.{target}", api=">=0.2.dev1,<0.3", summary=summary, tags=tags)
