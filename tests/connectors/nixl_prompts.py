"""A prefill engine: `python nixl_prompts.py MODEL SECRET_FILE [SETTINGS]` takes requests as JSON lines.

Writes "ready" and then a line for each request: {"id", "tokens", "kv_transfer"}; for {"call": name, …} what it returns.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time

BLOCK_SIZE = 8


def open_engine(model, secret_file, settings=None, **options):
    """A context with an engine that has the connector nixl, or the one that the settings name."""
    from frame.core.config.flat import from_flat
    from frame.core.plugin_host.registry import Registry
    from frame.testing.engines import SMALL, running
    from frame.testing.thread_executor import with_threads

    plain = {**SMALL, "model": str(model), "block_size": BLOCK_SIZE, "num_threads": 1, "kv_connector": "nixl"}
    plain |= settings or {}
    options = {"secret_file": str(secret_file), **options, **plain.pop("options", {})}
    if plain["kv_connector"] == "nixl":
        options = {"lease_seconds": 300, **options}
    return running(from_flat({**plain, "plugin": {plain["kv_connector"]: options}}), with_threads(Registry.load()))


class Asked:
    """Requests to an engine, whose steps are taken by `step`."""

    def __init__(self, engine):
        self.engine, self.outputs = engine, {}

    def add(self, name, prompt, params=None, count=10, salt=None):
        from frame.testing.engines import request

        one = request(name, prompt, count)
        one.kv_transfer, one.salt = params, salt
        self.outputs[name] = []
        self.engine.add(one)

    def step(self):
        """Returns the names of the requests that ended."""
        ended = []
        for output in self.engine.step():
            self.outputs[output.request_id].append(output)
            if output.finish_reason:
                ended.append(output.request_id)
        return ended

    def finish(self, name, seconds=60, beside=None):
        """The tokens of a request; `beside` steps too, as the loop of its engine does."""
        latest = time.monotonic() + seconds
        while not (self.outputs[name] and self.outputs[name][-1].finish_reason):
            assert time.monotonic() < latest, f"{name} does not end"
            self.step()
            if beside is not None:
                beside.step()
            time.sleep(0.0005)
        return self.tokens(name)

    def alone(self, prompt):
        """What the engine says to a prompt that it computes, because nothing is cached under this salt."""
        self.add(name := f"alone-{len(self.outputs)}", prompt, salt=f"salt-{len(self.outputs)}")
        tokens = self.finish(name)
        assert self.num_cached(name) == 0
        return tokens

    def rest(self):
        """Steps until nothing is held or read; returns how much of the cache is in use."""
        latest = time.monotonic() + 60
        while self.engine.has_unfinished():
            assert time.monotonic() < latest, "blocks are still held or read"
            self.step()
            time.sleep(0.001)
        return self.engine.stats().kv_usage

    def tokens(self, name):
        return [token for output in self.outputs[name] for token in output.token_ids]

    def num_cached(self, name):
        return next((one.num_cached for one in self.outputs[name] if one.num_cached is not None), 0)

    def counter(self, name, connector="nixl"):
        return self.engine.stats().connector_counters.get(f"{connector}_{name}", 0)


class Prefill:
    """The process of a prefill engine."""

    def __init__(self, model, secret_file, environment=(), **settings):
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(model), str(secret_file), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **dict(environment)},
        )
        self.number = 0

    def wait_ready(self):
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "the prefill engine ended"

    def ask(self, **question):
        self.begin(**question)
        return self.answer()

    def begin(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self):
        while not (line := self.process.stdout.readline()).startswith("{"):
            assert line, "the prefill engine ended"
        return json.loads(line)

    def prefill(self, prompt, **place):
        self.number += 1
        asks = {"do_remote_decode": True, "do_remote_prefill": False, **place}
        return self.ask(id=f"p{self.number}", prompt=prompt, params=asks, count=1)["kv_transfer"]

    def usage(self):
        return self.ask(call="usage")["result"]

    def counter(self, name, connector):
        """What it has counted; one that is idle tells only in a later step."""
        self.ask(id=f"later {self.number}", prompt=[3, 4, 5], params=None, count=1)
        return self.ask(call="counters")["result"].get(f"{connector}_{name}", 0)

    def close(self):
        self.process.kill()
        self.process.communicate()


def main():
    lines = queue.SimpleQueue()
    threading.Thread(target=lambda: [lines.put(line) for line in sys.stdin] and None, daemon=True).start()
    with open_engine(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])) as engine:
        asked = Asked(engine)
        print("ready", flush=True)
        while True:
            for name in asked.step() if engine.has_unfinished() else ():
                found = {"id": name, "tokens": asked.tokens(name), "kv_transfer": asked.outputs[name][-1].kv_transfer}
                print(json.dumps(found), flush=True)
            try:
                question = json.loads(lines.get(timeout=0.001))
            except queue.Empty:
                continue
            if question.get("call") == "usage":
                print(json.dumps({"result": asked.rest()}), flush=True)
            elif question.get("call") == "counters":
                print(json.dumps({"result": engine.stats().connector_counters}), flush=True)
            elif "call" in question:
                result = engine.call(question["call"], question.get("arguments", {}))
                print(json.dumps({"result": result}), flush=True)
            else:
                asked.add(question["id"], question["prompt"], question["params"], question["count"])


if __name__ == "__main__":
    main()
