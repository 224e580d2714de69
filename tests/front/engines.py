"""A fake engine: tokens by a fixed rule, several requests at once, one or more tokens a step; and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from frame.core.config.flat import from_flat
from frame.core.front.tokenizer import TokenizerSource
from frame.core.plugin_host.registry import Registry
from frame.interfaces import EngineInfo, EngineOutput, EngineStats, LogprobRows

INFO = EngineInfo(
    max_model_len=64, vocab_size=400, num_blocks=8, block_size=16, platform="fake", attention=["fake"], dtype="float32"
)


class FakeEngine:
    """Answers each request with `script(request)` (ids), `width` of them a step; ends at EOS, stop ids or length."""

    def __init__(self, script, width=1, info=INFO):
        self.info = info
        self.script = script
        self.width = width
        self.requests = {}
        self.aborted = []
        self.calls = []
        self.closed = False
        self.generated = 0

    def add(self, request):
        if len(request.prompt_ids) > 50:
            raise ValueError("the request needs more KV blocks than there are")
        self.requests[request.request_id] = [request, list(self.script(request))[: request.max_tokens], 0]

    def abort(self, request_ids):
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.requests.pop(request_id, None)

    def has_unfinished(self):
        return bool(self.requests)

    def step(self):
        outputs = []
        for request_id, state in list(self.requests.items()):
            request, ids, done = state
            new = ids[done : done + self.width]
            reason, stop = None, None
            for position, token in enumerate(new):
                if token in request.eos_token_ids and not request.params.ignore_eos:
                    new, reason = new[: position + 1], "stop"
                    break
                if token in request.params.stop_token_ids:
                    new, reason, stop = new[: position + 1], "stop", token
                    break
            state[2] = done + len(new)
            if reason is None and state[2] >= len(ids):
                reason = "length"
            outputs.append(
                EngineOutput(
                    request_id=request_id,
                    token_ids=new,
                    logprobs=rows(new, request.params.logprobs),
                    prompt_logprobs=None if done else rows(request.prompt_ids[1:], request.params.prompt_logprobs),
                    finish_reason=reason,
                    stop_reason=stop,
                    num_cached=None if done else 0,
                )
            )
            self.generated += len(new)
            if reason is not None:
                del self.requests[request_id]
        return outputs

    def stats(self):
        return EngineStats(running=len(self.requests), generated_tokens=self.generated)

    def call(self, method, arguments=None):
        self.calls.append((method, arguments))
        return True

    def close(self):
        self.closed = True


def rows(ids, k):
    """Token i itself at -1.5, then the k ids 0.. at -0.5, -1, …"""
    if k is None:
        return None
    ids = np.asarray(ids, np.int32)
    best = np.tile(np.arange(k, dtype=np.int32), (len(ids), 1))
    values = np.tile(-0.5 * np.arange(1, k + 1, dtype=np.float32), (len(ids), 1))
    return LogprobRows(
        token_ids=np.concatenate([ids[:, None], best], 1),
        logprobs=np.concatenate([np.full((len(ids), 1), -1.5, np.float32), values], 1),
        ranks=np.full(len(ids), 7, np.int32),
    )


def source_of(folder: Path | None, **settings: Any) -> TokenizerSource:
    """The tokenizer of a checkpoint in `folder`; None: there is to be none."""
    checkpoint: Any = SimpleNamespace(folder=folder, vocab_size=400, eos_token_ids=[2])
    return TokenizerSource(from_flat({"skip_tokenizer_init": folder is None, **settings}), checkpoint, Registry.load())
