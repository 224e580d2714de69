"""The tool parser of models that no other parser was written for: it infers the format from the chat template.

It renders the template with calls of known names and values. Their places in the text show the family of the format
(JSON objects, a name and JSON, tagged arguments, Python calls), and the text between them shows its markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from frame.interfaces import OutputReader, ParserRequest, ParserSetup

from .call_tags import TemplateCalls
from .json_calls import JsonCallReader
from .named_calls import NamedCallReader, NamedFormat
from .probes import FIRST, NUMBER, NUMBER_KEY, SECOND, TEXT, TEXT_KEY, bodies, common_end, json_end
from .pythonic import PythonicReader
from .tagged_calls import TaggedCallReader, TaggedFormat

_BETWEEN_TAGS = re.compile(r"(?<=[>\]])\s+(?=[<\[])|\n+")
_CLOSING = re.compile(r"^[>|\]\"'\s]+(?=[<\[])")
_NAME_KEY = re.compile(r'"(\w+)"\s*:\s*"$')
_ARGUMENTS_KEY = re.compile(r'"(\w+)"\s*:\s*\{\s*"' + TEXT_KEY)

Start = Callable[[ParserRequest], OutputReader]


class TemplateParser(TemplateCalls):
    """Reads calls in the form that the chat template writes. Raises `ValueError` when it writes none."""

    def __init__(self, setup: ParserSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        if setup.render is None:
            raise ValueError("tool parser 'template' needs a chat template, and the tokenizer has none")
        self._start, self._markers = read_template(setup.render)

    def tokens(self) -> Sequence[str]:
        """The markers that were found, and the special tokens of which they may consist."""
        return self._markers

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of the format that was found."""
        return self._start(request)


def read_template(render: Callable[..., str]) -> tuple[Start, Sequence[str]]:
    """A function that starts a reader of the template's calls, and their markers. Raises `ValueError`."""
    one, two = bodies(render)
    for read in (_json, _pythonic, _named, _tagged):
        found = read(one, two)
        if found is not None:
            start, markers = found
            return start, [part for marker in markers for part in _tokens(marker)]
    raise ValueError(f"tool parser 'template' cannot tell a call from the chat template's text {one[:200]!r}")


def _tokens(marker: str) -> list[str]:
    return [marker, *_parts(marker), *re.findall(r"<[^<>]*>|\[[A-Z_]+\]", marker)]


def _common_marker(first: str, second: str) -> str:
    """The marker at the end of both texts: their common end, without the rest of a marker that it begins inside."""
    return _CLOSING.sub("", common_end(first, second)).lstrip()


def _parts(text: str) -> list[str]:
    """The parts of a marker, between which models may write any white space."""
    return [part.strip() for part in _BETWEEN_TAGS.split(text) if part.strip()]


def _json(one: str, two: str) -> tuple[Start, list[str]] | None:
    """`{"name": …, "arguments": {…}}`, in a list or not."""
    del two
    head = one[: one.index(FIRST)]
    name_key, arguments_key = _NAME_KEY.search(head), _ARGUMENTS_KEY.search(one)
    if name_key is None or arguments_key is None or "{" not in one[: min(name_key.start(), arguments_key.start())]:
        return None
    opening = one.index("{")
    marker = one[:opening].rstrip().removesuffix("[").strip()
    closers = _parts(one[json_end(one, opening) :].lstrip().removeprefix("]"))
    keys = ((name_key.group(1),), (arguments_key.group(1),))
    begin = (marker,) if marker else ()

    def start(request: ParserRequest) -> OutputReader:
        return JsonCallReader(request, begin=begin, closers=closers, bare=not begin, keys=keys)

    return start, [*begin, *closers]


def _pythonic(one: str, two: str) -> tuple[Start, list[str]] | None:
    """`[name(key=value)]`."""
    del two
    if not one[one.index(FIRST) + len(FIRST) :].startswith(f"({TEXT_KEY}"):
        return None
    head = one[: one.index(FIRST)]
    marker = head.rstrip().removesuffix("[").strip()
    in_list = head.rstrip().endswith("[")
    rest = one[one.rindex(str(NUMBER)) + len(str(NUMBER)) :].strip().removeprefix(")").strip()
    closers = _parts(rest.removeprefix("]"))
    begin = (marker,) if marker else ()

    def start(request: ParserRequest) -> OutputReader:
        return PythonicReader(request, begin, closers, lines=bool(begin) and not in_list)

    return start, [*begin, *closers]


def _named(one: str, two: str) -> tuple[Start, list[str]] | None:
    """A name, a separator, and JSON arguments."""
    name_end = one.index(FIRST) + len(FIRST)
    opening = one.find("{", name_end)
    if opening < 0 or not re.match(r'\{\s*"' + TEXT_KEY, one[opening:]):
        return None
    first_end, second = json_end(two, two.index("{", two.index(FIRST))), two.find(SECOND)
    if second < 0:
        return None
    pre, between = one[: one.index(FIRST)], two[first_end:second]
    begin = _common_marker(pre, between) or pre.strip()
    separators = {one[name_end:opening].strip(), two[second + len(SECOND) : two.index("{", second)].strip()}
    numbered = len(separators) > 1  # the separators differ by the number of the call
    separator = common_end(*sorted(separators)) if numbered else separators.pop()
    closers = [*_parts(between.removesuffix(begin)), *_parts(one[json_end(one, opening) :])]
    form = NamedFormat(
        begin=(begin,),
        separators=(separator.lstrip("0123456789"),),
        opener=_parts(pre.rstrip().removesuffix(begin.rstrip()))[:1],
        closers=closers,
        name_holds_id=numbered,
    )

    def start(request: ParserRequest) -> OutputReader:
        return NamedCallReader(request, form)

    return start, [*form.begin, *form.separators, *form.opener, *form.closers]


def _tagged(one: str, two: str) -> tuple[Start, list[str]] | None:
    """A name, and each argument between tags."""
    order = (FIRST, TEXT_KEY, TEXT, NUMBER_KEY, str(NUMBER), SECOND)
    gaps, at = [], 0
    for word in order:
        found = two.find(word, at)
        if found < 0:
            return None
        gaps.append(two[at:found])
        at = found + len(word)
    pre, after_name, after_key, between_values, _, between_calls = gaps
    key_begin = _common_marker(after_name, between_values)
    value_end = between_values.removesuffix(key_begin)
    call_begin = _common_marker(pre, between_calls)
    if not (key_begin and value_end.strip() and call_begin and after_key.strip()):
        return None
    begins, key_ends = _parts(call_begin), _parts(after_key)
    ends = _parts(between_calls.removeprefix(value_end).removesuffix(call_begin))
    if not ends or len(key_ends) > 2:
        return None
    opener = [*_parts(pre.removesuffix(call_begin)), *begins[:-1]][:1]
    tail = two[at:].rpartition(str(NUMBER))[2].lstrip().removeprefix(value_end.strip())
    form = TaggedFormat(
        begin=(begins[-1],),
        end=ends[0],
        key_begin=key_begin,
        key_end=key_ends[0],
        value_begin=key_ends[1] if len(key_ends) == 2 else "",
        value_end=value_end.strip(),
        name_end=after_name.removesuffix(key_begin).strip(),
        opener=opener,
        closers=[part for part in (*ends[1:], *_parts(tail)) if part != ends[0]],
        padding=after_key.endswith("\n") and value_end.startswith("\n"),
    )

    def start(request: ParserRequest) -> OutputReader:
        return TaggedCallReader(request, form)

    markers = [form.key_begin, form.key_end, form.value_begin, form.value_end, form.name_end, form.end]
    return start, [*form.begin, *form.opener, *form.closers, *(marker for marker in markers if marker)]
