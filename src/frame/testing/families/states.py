"""Rows of models whose layers keep a running state of each request: Mamba, and hybrids with attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row import TINY, Family

_PURE: Mapping[str, Any] = {
    **{name: TINY[name] for name in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "num_hidden_layers": 3,
}
_MAMBA2: Mapping[str, Any] = {
    **_PURE,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
}

_MAMBA: Mapping[str, Any] = {**_PURE, "state_size": 6, "time_step_rank": 5}

ROWS: Mapping[str, Family] = {
    "mamba": Family("MambaForCausalLM", "mamba", {**_MAMBA, "use_bias": True}, states="all"),
    "mamba-untied": Family(
        "MambaForCausalLM",
        "mamba",
        {**_MAMBA, "use_conv_bias": False, "tie_word_embeddings": False, "conv_kernel": 3},
        in_matrix=True,
        states="all",
    ),
    "falcon-mamba": Family(
        "FalconMambaForCausalLM", "falcon_mamba", {**_MAMBA, "mixer_rms_eps": 0.01}, in_matrix=True, states="all"
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "mamba2",
        {**_MAMBA2, "time_step_limit": [0.3, 1.0], "use_bias": True},
        states="all",
    ),
    "mamba2-tied": Family(
        "Mamba2ForCausalLM",
        "mamba2",
        {**_MAMBA2, "n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True},
        in_matrix=True,
        states="all",
    ),
}
