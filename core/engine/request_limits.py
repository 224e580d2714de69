"""Whether a request can ever run, and how many tokens it may have. Knows no other request and no state."""

from __future__ import annotations

from ..config.tree import SchedulerConfig
from ..interfaces.engine import EngineRequest
from ..interfaces.kv import KVLayout
from ..interfaces.kv_layout import blocks_needed


class RequestLimits:
    """What model, step budget and KV cache leave to a single request."""

    def __init__(self, config: SchedulerConfig, layout: KVLayout, max_model_len: int) -> None:
        self._config = config
        self._layout = layout
        self._max_model_len = max_model_len

    def max_len(self, source: EngineRequest) -> int:
        """The most tokens of prompt and output together; raises `ValueError` when the request can never run."""
        name, prompt_len = source.request_id, len(source.prompt_ids)
        if prompt_len == 0:
            raise ValueError(f"request {name!r} has an empty prompt; at least one token is needed")
        if source.max_tokens < 1:
            raise ValueError(f"request {name!r}: max_tokens must be at least 1, got {source.max_tokens}")
        if source.pooling is not None and prompt_len > self._max_model_len:
            raise ValueError(f"request {name!r} has {prompt_len} tokens, max_model_len is {self._max_model_len}")
        # a pooling request yields no token, so its prompt may be as long as the model allows
        limit = self._max_model_len + (source.pooling is not None)
        max_len = min(prompt_len + source.max_tokens, limit)
        if prompt_len + len(source.output_ids) >= max_len:
            raise ValueError(
                f"request {name!r} has {prompt_len} prompt and {len(source.output_ids)} output tokens, which leaves "
                f"no room under max_model_len {self._max_model_len} and max_tokens {source.max_tokens}"
            )
        budget, num_encoded = self._config.max_num_batched_tokens, self._encoded(source)
        if not self._config.enable_chunked_prefill and prompt_len + num_encoded > budget:
            raise ValueError(
                f"the prompt of request {name!r} has {prompt_len + num_encoded} tokens; without chunked prefill at "
                f"most max_num_batched_tokens {budget} fit in a step"
            )
        # the last token is never fed back, so it needs no place
        needed, there = blocks_needed(self._layout, max_len - 1, num_encoded), self._layout.pools[0] - 1
        if needed > there:
            raise ValueError(
                f"request {name!r} needs {needed} blocks of {self._layout.block_size} tokens for its {max_len} tokens"
                f"{f' and {num_encoded} encoder tokens' if num_encoded else ''}, the KV cache has {there}; "
                "lower max_tokens or enlarge the cache"
            )
        return max_len

    def _encoded(self, source: EngineRequest) -> int:
        """The encoder tokens of a request, which one step computes, and a token of the decoder with them."""
        count = 0 if source.encoder_ids is None else len(source.encoder_ids)
        budget = self._config.max_num_batched_tokens
        if count > min(budget - 1, self._max_model_len):
            raise ValueError(
                f"the encoder prompt of request {source.request_id!r} has {count} tokens; the encoder reads at most "
                f"max_model_len {self._max_model_len}, in one step of fewer than max_num_batched_tokens {budget}"
            )
        return count
