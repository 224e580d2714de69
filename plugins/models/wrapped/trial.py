"""What a class of transformers asks of attention, learned by running it once without memory.

Each call of attention is recorded with its shapes, its scale and the tokens that it may see. What frame's attention
cannot do is an error with the reason, before any weight is read.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: What transformers knows frame's attention by, and the one that only notes what it is asked.
NAME = "frame"
TRIAL = "frame_trial"
#: Tokens of the run: a number that no size of a model is likely to be.
_TOKENS = 7
#: Most tokens between which masks are looked at.
_MOST = 1 << 16
#: Arguments that models hand down to attention which change nothing here, whatever their value.
_IGNORED = frozenset({
    "dropout", "position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "scaling", "is_causal",
    "token_type_ids", "layer_head_mask", "deterministic", "num_items_in_batch", "logits_to_keep", "input_ids",
    "inputs_embeds", "head_dim", "layer_idx", "hidden_shape",
})  # fmt: skip
#: Held during a trial: what is registered with transformers is there once for all threads.
_LOCK = threading.Lock()
_KNOWN = frozenset({"sliding_window", "softcap", "s_aux"})


class UnfitError(ValueError):
    """Why frame's attention cannot serve the class, in a sentence."""


@dataclass(frozen=True)
class Sight:
    """Which tokens one sees: all of its prompt, or those before it, within a `window` if that is above 0."""

    causal: bool = True
    window: int = 0


@dataclass(frozen=True)
class Call:
    """One call of attention in a forward pass, by the module called `name`, with the sizes of the whole model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sight: Sight
    soft_cap: float = 0.0
    sinks: str = ""  # the parameter of the module that holds them


class Record:
    """The calls of attention and experts in one forward pass of `model`, and the masks made for it."""

    def __init__(self, model: nn.Module, max_len: int) -> None:
        self.calls: list[Call] = []
        #: experts of each token by the name of the experts
        self.experts: dict[str, int] = {}
        self._max_len = max_len
        self._masks: list[tuple[Tensor, Sight]] = []
        self._names = {module: name for name, module in model.named_modules()}

    def mask(self, *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **others: Any) -> Tensor:
        """Registered with transformers: makes no mask, but notes what one would let tokens see."""
        del others
        mask = torch.empty(1, 1, q_length, kv_length, device="meta", dtype=torch.bool)
        self._masks.append((mask, see(mask_function, self._max_len)))
        return mask

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: Any = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """Registered with transformers: query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv]."""
        name = self._names.get(module)
        if name is None:
            raise UnfitError(f"a {type(module).__name__} that is no part of it calls attention")
        _check_shapes(name, query, key, value)
        check_keywords(name, more)
        sinks = ""
        if (given := more.get("s_aux")) is not None:
            sinks = next((key for key, one in module.named_parameters() if one is given), "")
            if not sinks:
                raise UnfitError(f"{name} computes its sinks")
        call = Call(
            name=name,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            sight=self._sight(name, module, attention_mask, more),
            soft_cap=float(more.get("softcap") or 0.0),
            sinks=sinks,
        )
        self.calls.append(call)
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def route(self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Registered with transformers: hidden [T, H], ids and weights [T, k]."""
        self.experts[self._names.get(module, "")] = ids.shape[-1]
        return torch.empty_like(hidden)

    def _sight(self, name: str, module: nn.Module, mask: Any, more: Mapping[str, Any]) -> Sight:
        if mask is None:
            causal = more.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            return Sight(bool(causal), int(more.get("sliding_window") or 0))
        found = [sight for one, sight in self._masks if one is mask]
        others = {sight for _, sight in self._masks}
        plain = mask.dtype == torch.bool and tuple(mask.shape[:3]) == (1, 1, _TOKENS)  # as one that was cut
        if not found and not (plain and len(others) == 1):
            raise UnfitError(f"{name} makes a mask of its own")
        return found[0] if found else others.pop()


def learn_calls(model: nn.Module, base: nn.Module, max_len: int) -> Record:
    """Runs `base`, on the meta device, and returns its calls, named as in `model`; raises `UnfitError`.

    `max_len` tokens are the most that a request may have.
    """
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface

    record = Record(model, max_len)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    given = {"attention_mask": torch.ones_like(ids), **forward_arguments(base, torch.zeros_like(ids))}
    with _LOCK, torch.inference_mode():
        AttentionInterface.register(TRIAL, record.attend)
        AttentionMaskInterface.register(TRIAL, record.mask)
        ExpertsInterface.register(TRIAL, record.route)
        try:
            out = base(input_ids=ids, **given)
        except UnfitError:
            raise
        except Exception as error:  # what a class does in its forward pass is its own
            raise UnfitError(f"its forward pass reads values on the host, or needs a cache: {_line(error)}") from error
        finally:
            # transformers keeps what is registered for the life of the process, and a record keeps its model
            for interface in (AttentionInterface, AttentionMaskInterface, ExpertsInterface):
                interface.register(TRIAL, _no_trial)
    hidden = out[0]
    if not record.calls:
        raise UnfitError("it has no attention that frame could compute")
    if tuple(hidden.shape[:2]) != (1, _TOKENS):
        raise UnfitError(f"its hidden states are {list(hidden.shape)}, not one for each token")
    return record


def _no_trial(*arguments: Any, **more: Any) -> None:
    raise RuntimeError("a model that was tried is called")


def forward_arguments(base: nn.Module, positions: Tensor) -> dict[str, Any]:
    """What each call of `base` is given besides tokens; `positions` [1, T]. Raises `UnfitError` if it takes none."""
    known = inspect.signature(base.forward).parameters
    if "position_ids" not in known:
        raise UnfitError("its forward pass takes no positions")
    return {"position_ids": positions, **switches(base)}


def switches(base: nn.Module) -> dict[str, Any]:
    """The arguments by which `base` is told to cache nothing."""
    known = inspect.signature(base.forward).parameters
    wanted = {"use_cache": False, "return_dict": True}
    return {key: value for key, value in wanted.items() if key in known}


def see(mask_function: Callable[..., Any], max_len: int) -> Sight:
    """What tokens see by a mask function of transformers; raises `UnfitError` for what frame's attention cannot do."""
    size = min(max(max_len, 2), _MOST)
    first = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(size)
    queries = sorted({0, 1, size // 3, size // 2, size - 1})
    try:
        rows = [mask_function(first, first, torch.tensor(query), keys) for query in queries]
        seen = torch.stack([torch.as_tensor(row, device="cpu").expand(size) for row in rows])
    except Exception as error:  # of a mask of the class's own, over tensors that are not there
        raise UnfitError(f"which tokens it sees depends on more than their positions: {_line(error)}") from error
    if bool(seen.all()):
        return Sight(causal=False)
    window = int(seen[-1].sum())
    distance = torch.tensor(queries)[:, None] - keys
    if not torch.equal(seen, (distance >= 0) & (distance < window)):
        raise UnfitError("its tokens see neither all tokens, nor those before them, nor a window of these")
    return Sight(window=0 if window == size else window)


def _check_shapes(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    for what, tensor in (("queries", query), ("keys", key), ("values", value)):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != _TOKENS:
            raise UnfitError(f"{name} attends with {what} of shape {list(tensor.shape)}, not one for each token")
    if key.shape[1] != value.shape[1] or key.shape[3] != query.shape[3]:
        raise UnfitError(f"{name} attends with keys {list(key.shape)} and values {list(value.shape)}")
    if value.shape[3] > key.shape[3]:
        raise UnfitError(f"{name} has values of {value.shape[3]} numbers, more than its keys")


def check_keywords(name: str, given: Mapping[str, Any]) -> None:
    """Raises `UnfitError` for an argument of attention that frame does not know."""
    unknown = [key for key, value in given.items() if value is not None and key not in _KNOWN | _IGNORED]
    unknown = [key for key in unknown if given[key] is not False]
    if unknown:
        raise UnfitError(f"{name} calls attention with {', '.join(sorted(unknown))}, which frame does not know")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
