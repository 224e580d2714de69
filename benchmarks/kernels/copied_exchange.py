"""An exchange of two ranks whose copy engines carry the tokens, so that it needs next to no multiprocessor.

As `gather`, each rank gets the tokens of both. One program tells the peer that a copy has arrived, one awaits its copy.
Whoever dispatches again has got the results of the call before, so that the peer's experts have read what is now
written over; and whoever sends results again has got tokens that were made of the last ones.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import (
    Activations,
    Dispatched,
    ExchangeSetup,
    ExchangeSpec,
    ExpertExchange,
    ForwardStep,
    Routing,
)
from frame.kernels.peer_copies import CopyBuffers, add_received, tell_arrived
from frame.kernels.peer_memory import PeerMemory, check, driver

#: Bytes before the memory of values: the signals of dispatch, and those of combine.
_SIGNALS = 256


class CopiedExchange(ExpertExchange):
    """One for each part of a batch that is under way: its memory holds one exchange."""

    def __init__(self, setup: ExchangeSetup, options: Any = None) -> None:
        del options
        spec, data = setup.spec, setup.groups.data
        self._data, self._rank = data, data.rank
        self._first = setup.groups.expert.rank * setup.spec.slots_per_rank
        row, chosen = spec.hidden_size * spec.dtype.itemsize, 2 * spec.top_k * 4
        device = torch.device(spec.device_type, torch.cuda.current_device())
        sizes = (2 * row * spec.max_tokens, 2 * chosen * spec.max_tokens, row * spec.max_tokens)
        self._memory = PeerMemory(device, data.rank, data.size, data.host, _SIGNALS + sum(sizes))
        whole, self._peer = self._memory._memory(), int(self._memory.addresses[1 - data.rank])
        self._at = (_SIGNALS, _SIGNALS + sizes[0], _SIGNALS + sizes[0] + sizes[1])
        self._values = whole[self._at[0] : self._at[1]].view(spec.dtype).view(-1, spec.hidden_size)
        self._chosen = whole[self._at[1] : self._at[2]].view(torch.int32).view(-1, 2 * spec.top_k)
        self._returned = whole[self._at[2] :].view(spec.dtype).view(-1, spec.hidden_size)
        self._calls = [self._signals(whole, at) for at in (128, 192)]
        self._nothing = torch.zeros(8, dtype=spec.dtype, device=device)

    def _signals(self, whole: Tensor, at: int) -> CopyBuffers:
        """What one of the two calls shares with the peer: two words at `at`."""
        words = torch.zeros(2, dtype=torch.int64, device=whole.device)
        theirs = torch.tensor([self._peer + at], dtype=torch.int64, device=whole.device)
        return CopyBuffers(whole[:128], whole[at : at + 16].view(torch.int64), theirs, words)

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        return None if spec.num_data_ranks == 2 else "it serves two data ranks"

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        del step  # both ranks have as many tokens
        count, top_k = len(x.values), routing.ids.shape[1]
        mine = slice(self._rank * count, (self._rank + 1) * count)
        packed = torch.cat((routing.weights.view(torch.int32), routing.ids), dim=1)
        for own, all_of_them, at in ((x.values, self._values, self._at[0]), (packed, self._chosen, self._at[1])):
            self._copy(own.contiguous(), at + self._rank * own.nbytes)
            all_of_them[mine].copy_(own)
        self._await(0)
        weights, ids = self._chosen[: 2 * count].split(top_k, dim=1)
        slots = (ids - self._first).contiguous()
        return Dispatched(self._values[: 2 * count], None, weights.contiguous().view(torch.float32), slots)

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        del sent
        parts = out.contiguous().chunk(2)
        self._copy(parts[1 - self._rank], self._at[2])
        self._await(1)
        mine = parts[self._rank]
        return mine + self._returned[: len(mine)]

    def _await(self, call: int) -> None:
        """Tells the peer that this rank has copied, and waits for the peer's copy, by one program each."""
        buffers, silent = self._calls[call], self._data.is_silent
        tell_arrived(buffers, rehearsed=silent)
        # a sum of what nobody reads; one of all values would wait in many programs, which others need
        add_received(self._nothing, buffers, self._nothing, rehearsed=silent)

    def _copy(self, values: Tensor, at: int) -> None:
        if self._data.is_silent:
            return
        given = ctypes.c_uint64(self._peer + at), ctypes.c_uint64(values.data_ptr()), ctypes.c_size_t(values.nbytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check("cuMemcpyAsync", driver().cuMemcpyAsync(*given, stream))

    def close(self) -> None:
        self._memory.close()
