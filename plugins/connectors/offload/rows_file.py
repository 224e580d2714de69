"""How the file with the rows of one worker is laid out: a head, a mark for each row, the rows.

A row's mark is its generation and a seal over its content, its key and its place. Rows of tokens and those of states
have files of their own.
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<8s16sQQ16s")  # magic, how bytes lie in a row, its bytes, rows, identity
MARK = struct.Struct("<QQ")  # generation, seal
MAGIC = b"frameRW1"
MARKS_AT = 4096
#: Begins the names of files of states.
STATES = "state-"


def rows_file(place: int, kind: str = "") -> str:
    """The name of the file of a worker; `kind` is `STATES` or nothing."""
    return f"{kind}rows-{place}"


def form_file(place: int, kind: str = "") -> str:
    """The name of the file that says which layers and heads lie in its rows."""
    return f"{kind}form-{place}"


def rows_start(num_rows: int) -> int:
    """Where the first of so many rows lies in the file."""
    return -(-(MARKS_AT + MARK.size * num_rows) // 4096) * 4096
