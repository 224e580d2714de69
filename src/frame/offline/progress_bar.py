"""Progress bars of offline runs. Knows tqdm's interface only."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

from frame.core.front.outputs import PoolingRequestOutput, RequestOutput

#: False: no bar; True: tqdm's; otherwise a callable that makes a bar from tqdm's keywords
ProgressOption: TypeAlias = bool | Callable[..., Any]


class Progress:
    """A progress bar over `total` steps, which shows nothing where `option` is False."""

    def __init__(self, option: ProgressOption, total: int, label: str, unit: str) -> None:
        self._bar: Any = None
        self._start = time.perf_counter()
        self._num_in = self._num_out = 0
        if not option:
            return
        make: Any = option
        if option is True:
            from tqdm.auto import tqdm as make
        self._bar = make(total=total, desc=label, unit=unit, dynamic_ncols=True)

    def advance(self) -> None:
        """Counts one finished step."""
        if self._bar is not None:
            self._bar.update(1)

    def finish(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        """Counts one finished request; shows the tokens per second of prompts and of outputs."""
        if self._bar is None:
            return
        self._num_in += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._num_in += len(output.encoder_prompt_token_ids or ())
            self._num_out += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_in / seconds:.0f} tok/s, output: {self._num_out / seconds:.0f} tok/s", refresh=False
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
