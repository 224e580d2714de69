"""Words that travel between GPUs with the number of the call in one store of eight bytes (NCCL's LL protocol).

Whoever sees the number has the word, so nothing waits for a fence. A packet's low half is the word, its high half the
number, of which the low 32 bits count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def _awaiting(count: int) -> tl.constexpr:
    """Assembly that reads `count` packets until each has the number of the call, and gives their words.

    The number is the same for all. Outputs come first, then addresses, then numbers.
    """
    loads = [f"ld.volatile.global.v2.b32 {{${place}, number{place}}}, [${count + place}];" for place in range(count)]
    found = [f"setp.ne.b32 missing, number0, ${2 * count};"]
    found += [f"setp.ne.or.b32 missing, number{place}, ${2 * count}, missing;" for place in range(1, count)]
    names = ", ".join(f"number{place}" for place in range(count))
    lines = [".reg .pred missing;", f".reg .b32 {names};", "again:", *loads, *found, "@missing bra again;"]
    return tl.constexpr("{ " + " ".join(lines) + " }")


_AWAIT_ONE, _AWAIT_TWO, _AWAIT_FOUR = _awaiting(1), _awaiting(2), _awaiting(4)


@triton.jit
def as_packets(word, epoch):
    """The packets of words in the call `epoch`."""
    return (word.to(tl.int64) & 0xFFFFFFFF) | (epoch << 32)


@triton.jit
def awaited(own, epoch, start, lane, kept, AWAITED: tl.constexpr):
    """The words of the packets from `start` of the memory at address `own`, once they are there; 0 where not `kept`.

    The caller keeps lane 0, which those that are not kept wait for, too.

    AWAITED words of a thread are waited for by that thread alone; 0: all of a program's by all of its threads.
    """
    if AWAITED > 0:
        # lanes that are not kept wait for the first one's, which comes for certain
        source = (own + 8 * (start + tl.where(kept, lane, 0))).to(tl.int64)
        number = epoch.to(tl.int32) + tl.zeros(lane.shape, tl.int32)
        if AWAITED == 4:
            word = tl.inline_asm_elementwise(
                _AWAIT_FOUR, "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [source, number], tl.int32, is_pure=False, pack=4
            )
        elif AWAITED == 2:
            word = tl.inline_asm_elementwise(
                _AWAIT_TWO, "=r,=r,l,l,r,r", [source, number], tl.int32, is_pure=False, pack=2
            )
        else:
            word = tl.inline_asm_elementwise(_AWAIT_ONE, "=r,l,r", [source, number], tl.int32, is_pure=False, pack=1)
        word = tl.where(kept, word, 0)
    else:
        source = own.to(tl.pointer_type(tl.int64)) + start + lane
        number = (epoch << 32) >> 32
        packet = tl.load(source, mask=kept, other=0, volatile=True)
        missing = tl.sum((kept & ((packet >> 32) != number)).to(tl.int32))
        while missing > 0:
            packet = tl.load(source, mask=kept, other=0, volatile=True)
            missing = tl.sum((kept & ((packet >> 32) != number)).to(tl.int32))
        word = packet.to(tl.int32)
    return word


def words_awaited(width: int, warps: int, device: torch.device) -> int:
    """AWAITED for rows of `width` words: assembly is for GPUs alone."""
    return min(4, max(1, width // (32 * warps))) if device.type == "cuda" else 0
