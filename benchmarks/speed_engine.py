"""The engine process of `server_speed.py`: no model, a token for each stream and step, as fast as it is asked.

Nothing is emitted between the first tokens, which come at once, and the moment when as many streams are there as the
requests say.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TEXT = "The little house by the sea has a red door, and every morning a cat sits in front of it and waits for the sun. "


class SpeedEngine:
    """Steps of one token for each stream. `extra_args`: `streams` to wait for, `period` seconds of a step, `settle`
    seconds between the last first token and the next step.
    """

    def __init__(self, token_ids: list[int], vocab_size: int) -> None:
        from frame.core.interfaces.client import EngineInfo
        from frame.core.interfaces.engine import EngineStats

        self.info = EngineInfo(
            max_model_len=65536, vocab_size=vocab_size, num_blocks=1, block_size=16, platform="fake",
            attention=["fake"], dtype="float32",
        )  # fmt: skip
        self._token_ids = token_ids
        self._new: list[Any] = []
        self._running: dict[str, tuple[Any, int]] = {}
        self._ended: list[str] = []
        self._stats = EngineStats(num_blocks=1)
        self._next = 0.0

    def watch(self, journal: Any, suspects: Any) -> None:
        """Journals nothing."""

    def add(self, request: Any) -> None:
        """Takes a request in."""
        self._new.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests."""
        self._ended += [name for name in request_ids if self._running.pop(name, None) is not None]

    def has_unfinished(self) -> bool:
        """Whether a step has something to do; streams that wait for others have not."""
        return bool(self._new or self._ended or self._complete())

    patience = 0.0  # it holds no blocks

    def has_idle_work(self) -> bool:
        """Nothing is recorded."""
        return False

    def _complete(self) -> bool:
        first = next(iter(self._running.values()), None)
        return first is not None and (first[1] > 1 or len(self._running) >= first[0].params.extra_args["streams"])

    def step(self) -> list[Any]:
        """First tokens at once; else one token for every stream, at its time."""
        from frame.core.interfaces.engine import EngineOutput

        outputs = [EngineOutput(request_id=name, finish_reason="abort") for name in self._ended]
        self._ended = []
        if self._new or outputs:
            for request in self._new:
                self._running[request.request_id] = request, 1
                first = EngineOutput(request_id=request.request_id, token_ids=self._token_ids[:1], num_cached=0)
                outputs.append(first)
                self._next = time.perf_counter() + request.params.extra_args["settle"]
            self._new = []
            return outputs
        if (wait := self._next - time.perf_counter()) > 0:
            time.sleep(wait)
        outputs = [self._advance(name, request, count) for name, (request, count) in list(self._running.items())]
        if self._running:
            request = next(iter(self._running.values()))[0]
            self._next = max(self._next + request.params.extra_args["period"], time.perf_counter() - 1.0)
        return outputs

    def _advance(self, name: str, request: Any, count: int) -> Any:
        from frame.core.interfaces.engine import EngineOutput

        output = EngineOutput(request_id=name, token_ids=[self._token_ids[count % len(self._token_ids)]])
        if count + 1 >= request.max_tokens:
            output.finish_reason = "length"
            del self._running[name]
        else:
            self._running[name] = request, count + 1
        return output

    def stats(self) -> Any:
        """Counters that nobody reads here."""
        return self._stats

    def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        """Knows no method."""
        raise ValueError(f"no method {method!r}")

    def check(self) -> None:
        """Never fails."""

    def close(self) -> None:
        """Forgets what runs."""
        self._running.clear()


def main() -> int:
    """The engine process, as its supervisor starts it."""
    from tokenizers import Tokenizer

    import frame.core
    from frame.core.config.tree import FrameConfig
    from frame.core.processes.engine_process import EngineProcess

    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", type=Path)
    parser.add_argument("--socket")
    parser.add_argument("--control-fd", type=int)
    given, _ = parser.parse_known_args()
    config = FrameConfig.model_validate_json(given.config_file.read_text())

    def prepare(_: FrameConfig, stage: Callable[[str], None]) -> Callable[[], SpeedEngine]:
        stage("pretending")
        tokenizer = Tokenizer.from_file(str(Path(frame.core.__path__[0]) / "demo" / "tokenizer.json"))
        ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        return lambda: SpeedEngine(ids, tokenizer.get_vocab_size())

    return EngineProcess(config, given.socket, given.control_fd, prepare).run()


if __name__ == "__main__":
    raise SystemExit(main())
