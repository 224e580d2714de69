"""Tool calls as JSON objects, alone or in lists, after markers or without. Knows no model's markers."""

from __future__ import annotations

from collections.abc import Sequence

from frame.interfaces import ParserRequest

from .calls import CallReader
from .json_call import JsonCall, KeyedCall
from .scan import Markers, Stops

#: The usual keys of a call's name and of its arguments.
KEYS = (("name",), ("arguments", "parameters"))


class JsonCallReader(CallReader):
    """Calls as JSON objects, one or a list of them after each marker.

    Without markers the output must begin with the calls, and only offered functions count as calls: other JSON is an
    answer. `separators` may stand between objects, `closers` after them. Of `keys`, the first are those of a name and
    the second those of arguments; None: the only key of a call is the name itself.
    """

    def __init__(
        self,
        request: ParserRequest,
        *,
        begin: Sequence[str] = (),
        closers: Sequence[str] = (),
        separators: Sequence[str] = (",", ";"),
        bare: bool = False,
        keys: tuple[Sequence[str], Sequence[str]] | None = KEYS,
    ) -> None:
        super().__init__(request)
        self._begin = Markers(begin)
        self._closers = Markers(closers)
        self._separators = Markers((*separators, *closers))
        self._stops = Stops(closers, begin)
        self._bare = bare
        self._keys = keys
        self._marked = False
        self._in_list = False
        self._call: JsonCall | None = None
        if bare:
            self.state = self._first

    def outside(self) -> bool:
        """Reads content up to a marker."""
        if self.marked_after_content(self._begin) is None:
            return False
        self._marked = True
        self.state = self._before_call
        return True

    def _first(self) -> bool:
        """Reads the beginning of an output, which may be calls without a marker."""
        self.scan.mark()
        self.state = self._before_bare
        return True

    def _before_bare(self) -> bool:
        if not self.scan.skip_space():
            return False
        if self.scan.text[self.scan.at] in "[{":
            self._marked = False
            self.state = self._before_call
        else:
            self._leave()
        return True

    def _before_call(self) -> bool:
        if not self.scan.skip_space():
            return False
        character = self.scan.text[self.scan.at]
        if character == "[" and not self._in_list:
            self._in_list = True
            self.scan.at += 1
        elif character == "{":
            known_only = self._bare and not self._marked
            if self._keys is None:
                self._call = KeyedCall(self, known_only, (), (), self._stops)
            else:
                self._call = JsonCall(self, known_only, *self._keys, self._stops)
            self.state = self._in_call
        elif character == "]" and self._in_list:
            self.scan.at += 1
            self.scan.unmark()  # an empty list holds no call
            self._in_list, self.state = False, self._after_calls
        else:
            self._leave()
        return True

    def _in_call(self) -> bool:
        call = self._call
        if call is None:
            return False
        more = call.step()
        if call.ended:
            self.state = self._after_call_object
        elif call.failed:
            self._leave()
        return more

    def _after_call_object(self) -> bool:
        """After a call: reads another call, the end of the list, or the end of the block. Drops white space."""
        if not self.scan.skip_space():
            return False
        character = self.scan.text[self.scan.at]
        if self._in_list and character == "]":
            self.scan.at += 1
            self._in_list, self.state = False, self._after_calls
            return True
        if character == "{":
            self.scan.mark()
            self.state = self._before_call
            return True
        self.scan.mark()
        marker = self.scan.over(self._separators)
        if marker is None:
            self.scan.unmark()
            return False
        if not marker:
            self._leave()
        elif marker in self._closers.texts:
            self.scan.unmark()
            self._in_list, self.state = False, self._after_calls
        else:
            self.state = self._before_call
        return True

    def _after_calls(self) -> bool:
        """Reads a closing marker, if there is one."""
        if not self.scan.skip_space():
            return False
        if self.scan.over(self._closers) is None:
            return False
        self._in_list, self.state = False, self.outside
        return True

    def _leave(self) -> None:
        """Reads content again, because no call stands here."""
        self.degrade()
        self._in_list, self._call = False, None
        self.state = self.outside
