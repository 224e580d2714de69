"""`LoRARequest`: which adapter a request has, and the steps until an engine has it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.core.front.prompts import InvalidRequest
from frame.core.interfaces.adapters import AdapterSource
from frame.quoting import quoted

#: Seconds between two questions whether an adapter has been read.
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by the name, the number (from 1) and the folder that the caller gives it.

    With `load_inplace` it is read again, and what was loaded under its name serves only requests from before.
    `base_model_name` changes nothing: the adapter's own configuration is read.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    @property
    def replaced(self) -> str:
        """A text that each replacement has anew, "" for none."""
        return secrets.token_hex(8) if self.load_inplace else ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


class KnownAdapters:
    """The numbers and names that callers have used: neither may stand for two adapters."""

    def __init__(self) -> None:
        self._by_number: dict[int, LoRARequest] = {}

    def source(self, given: Any) -> AdapterSource:
        """Raises `InvalidRequest` for what is no `LoRARequest`, or contradicts an earlier one."""
        if not isinstance(given, LoRARequest):
            raise InvalidRequest(f"lora_request must be a LoRARequest, got {type(given).__name__}", "lora_request")
        number, name, path = given.lora_int_id, given.lora_name, given.lora_path
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidRequest(f"lora_int_id must be a whole number from 1, got {quoted(number)}", "lora_request")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise InvalidRequest("a LoRARequest needs a lora_name and a lora_path", "lora_request")
        for other in self._by_number.values():
            same = (other.lora_int_id == number, other.lora_name == name)
            if any(same) and not (all(same) and (other.lora_path == path or given.load_inplace)):
                raise InvalidRequest(
                    f"the adapter {quoted(name)} ({number}, {path}) contradicts an earlier one, "
                    f"{quoted(other.lora_name)} ({other.lora_int_id}, {other.lora_path}): "
                    "each has its own number, name and folder",
                    "lora_request",
                )
        self._by_number[number] = given
        return AdapterSource(name, str(Path(path).absolute()))

    def forget(self, number: int) -> str | None:
        """The name of the adapter with this number, which is unknown from now on; None if it is already."""
        known = self._by_number.pop(number, None)
        return None if known is None else known.lora_name

    def name_of(self, number: int) -> str | None:
        """The name of the adapter with this number."""
        known = self._by_number.get(number)
        return None if known is None else known.lora_name

    def numbers(self) -> set[int]:
        """The numbers that stand for an adapter."""
        return set(self._by_number)


def load_now(call: Callable[[str, dict[str, Any]], Any], source: AdapterSource, replace: str) -> None:
    """Has an engine of this thread read an adapter; raises `InvalidRequest` with the reason against it."""
    try:
        while not call("load_adapter", {"name": source.name, "path": source.path, "replace": replace}):
            time.sleep(POLL_SECONDS)
    except ValueError as error:
        raise InvalidRequest(str(error), "lora_request") from error
