"""Long rows of a recurrence in segments that are computed at once, for kernels/scans.py and kernels/delta.py.

Segments are runs of the step's tokens, so that at most one row goes over the border between two of them: room for its
state there is all that is needed, however many rows there are. A first launch computes the rows' beginnings, and of
segments in the midst of a row what they add to a state (and, where that is no mere factor, what they make of one). A
short serial pass gives the states at the borders, and a second launch computes all else from these.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Longer than any step: rows are whole.
WHOLE = 1 << 30


def segment_for(max_query_len: int, segment: int) -> int:
    """Tokens of a segment, `segment` where a row may have more than two of them."""
    return segment if max_query_len > 2 * segment else WHOLE


def num_pieces(num_tokens: int, num_rows: int, segment: int) -> int:
    """No more pieces have the rows of a step, each of which is what a row has in a segment."""
    return max(num_tokens - 1, 0) // segment + num_rows


@triton.jit
def piece_of(rows, num_rows, piece, segment):
    """(row, number of the segment) of a piece; the row may have no token there.

    The pieces of row i begin with number query_start[i] // segment + i.
    """
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if tl.load(rows.query_start + middle) // segment + middle <= piece:
            left = middle + 1
        else:
            right = middle
    row = tl.maximum(left - 1, 0)
    return row, piece - row


@triton.jit
def span_of(start, count, number, segment):
    """[low, high) of the tokens of a row in a segment."""
    first = number * segment
    return tl.maximum(start, first), tl.minimum(start + count, first + segment)
