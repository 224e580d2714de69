"""An engine process without a model: repeats each prompt, token by token, or says what `extra_args["answer"]` holds.

What a request says of its KV transfer is echoed with its last output. Faults are asked for in `extra_args`, and that an
output ends (`once`: with finish reason "stop") where the prompt does.

`config.plugin["fake"]`: `delay` seconds a step, `libraries` seconds before it could begin and `startup` seconds from
then on, `broken` (start-up error), `dies` (exit status before ready), `caches` (a prompt that came before with the same
salt counts as found in the cache), `counters` and `gauges` (what a KV connector has reported). Of so many engines or
more: `refused_from` (the configuration is refused), `lost_from` (a worker is lost before it could begin), `broken_from`
(start-up error), `short_from` (32 tokens fit). `broken_if` is a file with which none starts, and
`refused_if` one with which none could begin.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from frame.core.config.tree import FrameConfig
from frame.core.engine.request import QueueFullError
from frame.core.interfaces.client import BrokenEngineError, EngineInfo
from frame.core.interfaces.engine import EngineOutput, EngineRequest, EngineStats
from frame.core.interfaces.step import LogprobRows, NewRequest, StepPlan
from frame.core.processes.engine_process import EngineProcess

NONE = np.zeros(0, np.int32)


class FakeEngine:
    def __init__(self, config: FrameConfig, vocab_size: int = 4096) -> None:
        short = at_least(config, "short_from")
        self.info = EngineInfo(
            max_model_len=32 if short else config.model.max_model_len or 512,
            vocab_size=vocab_size,
            num_blocks=100,
            block_size=16,
            platform="fake",
            attention=["fake"],
            dtype="float32",
        )
        self._model = config.model.model
        self._delay = float(config.plugin.get("fake", {}).get("delay", 0.0))
        self._prompts: set[tuple[str | None, bytes]] | None = (
            set() if config.plugin.get("fake", {}).get("caches") else None
        )
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._pending: list[EngineOutput] = []
        self._counters = EngineStats(num_blocks=100)
        self._counters.connector_counters = config.plugin.get("fake", {}).get("counters", {})
        self._counters.connector_gauges = config.plugin.get("fake", {}).get("gauges", {})
        self._journal: Any = None
        self._paused = False
        self._slots: list[str | None] = [None] * 64

    def watch(self, journal: Any, suspects: Any) -> None:
        journal.open(len(self._slots))
        if not suspects:
            journal.clear()
        self._journal = journal

    def _note_step(self) -> None:
        """Slots as the real engine hands them out: stable while a request runs."""
        plan = StepPlan(step=0, removed_slots=NONE, added=[], appends=[], slots=NONE, num_scheduled=NONE,
                        num_computed=NONE, samples=NONE, num_drafts=NONE)  # fmt: skip
        self._slots = [name if name in self._running else None for name in self._slots]
        for name, (request, _) in self._running.items():
            if name not in self._slots and None in self._slots:
                slot = self._slots.index(None)
                self._slots[slot] = name
                plan.added.append(NewRequest(slot=slot, request_id=name, token_ids=NONE, prompt_len=1, num_computed=0,
                                             block_ids=[], params=request.params, seed=0))  # fmt: skip
        plan.slots = np.array([slot for slot, name in enumerate(self._slots) if name], np.int32)
        self._journal.launch(plan)

    def add(self, request: EngineRequest) -> None:
        if (request.params.extra_args or {}).get("fault") == "add":
            raise ValueError("this request can never run")
        if (request.params.extra_args or {}).get("fault") == "queue":
            raise QueueFullError("4096 requests wait")
        self._running[request.request_id] = (request, len(request.output_ids))

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self._pending.append(EngineOutput(request_id=request_id, finish_reason="abort"))

    def step_with_peers(self, ask: Callable[[int], None]) -> None:
        """It steps alone, since it has no experts."""

    def step(self) -> list[EngineOutput]:
        outputs, self._pending = self._pending, []
        if self._running:
            faults = [(request.params.extra_args or {}).get("fault") for request, _ in self._running.values()]
            time.sleep(0.05 if "slow" in faults else self._delay)
        self._note_step()
        for request_id, (request, count) in list(self._running.items()):
            fault = (request.params.extra_args or {}).get("fault")
            if fault == "step" and count == 2:
                raise RuntimeError("the device said no")
            if fault == "exit" and count == 2:
                os._exit(7)
            if fault == "hang" and count == 2 and not request.output_ids:
                time.sleep(3600)
            outputs.append(self._advance(request_id, request, count))
        self._counters.steps += 1
        self._journal.answer()
        return outputs

    def _advance(self, request_id: str, request: EngineRequest, count: int) -> EngineOutput:
        prompt = request.prompt_ids
        answer = (request.params.extra_args or {}).get("answer")
        token = int(answer[count]) if answer else int(prompt[count % len(prompt)])
        output = EngineOutput(request_id=request_id, token_ids=[token])
        if count == 0:
            output.num_cached, output.scheduled = self._look_up(request), time.time()
        if request.params.logprobs is not None:
            columns = np.arange(request.params.logprobs + 1, dtype=np.int32)
            ids = np.where(columns == 0, token, columns).astype(np.int32)[None]
            output.logprobs = LogprobRows(
                token_ids=ids, logprobs=-columns.astype(np.float32)[None], ranks=np.ones(1, np.int32)
            )
        if request.params.prompt_logprobs is not None and count == 0:
            rows = prompt[1:, None].astype(np.int32)
            output.prompt_logprobs = LogprobRows(
                token_ids=rows, logprobs=np.full(rows.shape, -0.5, np.float32), ranks=np.ones(len(rows), np.int32)
            )
        self._counters.generated_tokens += 1
        if count + 1 >= request.max_tokens:
            output.finish_reason = "length"
        once = (request.params.extra_args or {}).get("once") and count + 1 == len(prompt)
        if once or (answer and count + 1 == len(answer)):
            output.finish_reason = "stop"
        if token in (request.params.stop_token_ids or []):
            output.finish_reason, output.stop_reason = "stop", token
        if output.finish_reason is not None:
            if request.kv_transfer is not None:
                output.kv_transfer = {"echo": request.kv_transfer, "num_prompt_tokens": len(prompt)}
            del self._running[request_id]
        else:
            self._running[request_id] = (request, count + 1)
        return output

    def _look_up(self, request: EngineRequest) -> int:
        if self._prompts is None:
            return 0
        prompt = request.salt, request.prompt_ids.tobytes()
        found = prompt in self._prompts
        self._prompts.add(prompt)
        return len(request.prompt_ids) if found else 0

    def has_unfinished(self) -> bool:
        return bool(self._pending or (self._running and not self._paused))

    patience = 0.0

    def has_idle_work(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        self._counters.running = len(self._running)
        return self._counters

    def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        if method == "echo":
            return arguments
        if method == "reset_prefix_cache":
            return True
        if method == "worker" and arguments is not None:
            time.sleep(float(arguments.get("seconds", 0)))
            return [arguments["method"]]
        if method in ("pause", "resume"):
            self._paused = method == "pause"
            return len(self._running)
        if method in ("is_paused", "is_sleeping"):
            return self._paused and method == "is_paused"
        if method == "model":
            return self._model
        if method == "update_weights":
            if (arguments or {}).get("model") == "broken":
                raise BrokenEngineError("neither the new nor the old weights can be read: gone")
            return None
        raise ValueError(f"no method {method!r}")

    def check(self) -> None:
        pass

    def progress(self) -> None:
        pass

    def close(self) -> None:
        self._running.clear()


def at_least(config: FrameConfig, option: str) -> bool:
    """Whether there are as many engines as an option says."""
    return config.data_parallel.data_parallel_size >= int(config.plugin.get("fake", {}).get(option, 999))


def prepare_fake(config: FrameConfig, stage: Callable[[str], None]) -> Callable[[], FakeEngine]:
    options = config.plugin.get("fake", {})
    if at_least(config, "refused_from"):
        raise ValueError("so many engines are impossible")
    if Path(options.get("refused_if", "/nothing")).exists():
        raise ValueError("the model has gone")
    if at_least(config, "lost_from"):
        raise RuntimeError("worker 1 of 2 died")
    time.sleep(float(options.get("libraries", 0.0)))

    def build() -> FakeEngine:
        stage("pretending")
        time.sleep(float(options.get("startup", 0.0)))
        if "dies" in options:
            os._exit(int(options["dies"]))
        if "broken" in options:
            raise ValueError(str(options["broken"]))
        if at_least(config, "broken_from") or Path(options.get("broken_if", "/nothing")).exists():
            raise ValueError("no memory is left")
        return FakeEngine(config, int(options.get("vocab_size", 4096)))

    return build


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", type=Path)
    parser.add_argument("--socket")
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--journal-fd", type=int)
    arguments, _ = parser.parse_known_args()
    tree = FrameConfig.model_validate_json(arguments.config_file.read_text())
    process = EngineProcess(tree, arguments.socket, arguments.control_fd, prepare_fake, arguments.journal_fd)
    raise SystemExit(process.run())
