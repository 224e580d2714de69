"""What the API processes of a server tell each other of adapters, through their parent."""

from __future__ import annotations

import msgspec


class AdapterNews(msgspec.Struct, tag=True):
    """API process to supervisor, and from it to all of them: requests may name this adapter; not, without a `path`."""

    name: str
    path: str = ""
