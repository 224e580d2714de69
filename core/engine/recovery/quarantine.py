"""Which requests may be computed while some are under suspicion of breaking steps.

Suspects wait until the others have begun; then each group runs alone until all of it got past the place where the step
broke. Asks nothing and costs nothing while nobody is suspected.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...processes.journal import journal_name
from ..request import Request
from .suspects import Suspects

#: Tokens after which a request on trial is acquitted: more than steps in flight and answers on their way.
_PROOF_TOKENS = 6
#: Requests that are replayed arrive within this time of the first one.
_ARRIVAL_SECONDS = 0.15
#: The longest that suspects wait for the others to begin.
_GRACE_SECONDS = 1.5


class Quarantine:
    """Asked by the scheduler for each plan while `active`."""

    def __init__(self) -> None:
        self._suspects = Suspects()
        self._trial: dict[str, int] = {}  # request id -> its tokens when the trial began
        self._began = False
        self._since: float | None = None

    @property
    def active(self) -> bool:
        """Whether any request is suspected."""
        return bool(self._trial or self._suspects)

    def suspect(self, suspects: Suspects) -> None:
        """Takes over what the death of an earlier engine left; the requests themselves are yet to come."""
        self._suspects = suspects

    def blame(self, requests: list[Request]) -> Request | None:
        """A step of these raised; returns the one at fault when it was alone."""
        if self._trial:
            self._suspects.groups.insert(0, [journal_name(name) for name in self._trial])
            self._trial = {}
        name = self._suspects.blame([journal_name(request.request_id) for request in requests])
        self._began = True  # they are all here
        return next((one for one in requests if journal_name(one.request_id) == name), None)

    def review(self, requests: Mapping[str, Request]) -> None:
        """Acquits who got far enough or ended, and begins the next trial; called before each plan while `active`."""
        self._trial = {
            name: start
            for name, start in self._trial.items()
            if name in requests and requests[name].num_tokens - start < _PROOF_TOKENS
        }
        if self._trial or not (self._began or self._may_begin(requests)):
            return
        self._began = True
        present = {journal_name(name): request for name, request in requests.items()}
        while self._suspects and not self._trial:
            group = self._suspects.groups.pop(0)
            self._trial = {present[name].request_id: present[name].num_tokens for name in group if name in present}
        if not self._trial:
            self._began, self._since = False, None

    def allows(self, request: Request) -> bool:
        """Whether the request may be computed now."""
        if self._trial:
            return request.request_id in self._trial
        name = journal_name(request.request_id)
        return all(name not in group for group in self._suspects.groups)  # those wait for their trial

    def _may_begin(self, requests: Mapping[str, Request]) -> bool:
        now = time.monotonic()
        if self._since is None:
            if requests:
                self._since = now
            return False
        waited = now - self._since
        if waited < _ARRIVAL_SECONDS:
            return False
        if waited >= _GRACE_SECONDS:
            return True
        others = [one for one in requests.values() if self.allows(one)]
        return all(one.num_tokens > one.prompt_len + len(one.source.output_ids) for one in others)
