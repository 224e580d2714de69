"""The API keys of a listener."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class KeyRing:
    """The configured keys. Compares a key with all of them in constant time; stores only digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def owner(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The digest of the valid key in the headers (`Authorization: Bearer KEY` or `x-api-key: KEY`).

        None without a valid key; "" when no keys are configured.
        """
        if not self._digests:
            return ""
        owner = None
        for name, value in headers:
            presented = None
            if name == b"x-api-key":
                presented = value.strip()
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                presented = value[7:].strip()
            if presented is not None:
                digest = hashlib.sha256(presented).digest()
                found = False
                for known in self._digests:  # no early exit, so that the time does not depend on which key matched
                    found |= hmac.compare_digest(digest, known)
                owner = digest.hex() if found else owner
        return owner
