"""Models whose layers keep a running state, engines for them, and prompts, for tests of connectors."""

from __future__ import annotations

import json
from contextlib import contextmanager

from frame import Provider
from frame.core.config.flat import from_flat
from frame.core.interfaces.provider import API_VERSION
from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.plugins.models.mistral import MistralForCausalLM
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, request, running, tokens_of
from frame.testing.thread_executor import with_threads
from tests.contract.recurrent import Decay

MODELS = ("mamba2", "qwen3-next", "windowed")
BLOCK_SIZE = 8
SIZES = (90, 17, 64, 100, 5)
#: Tokens of which a prefix is a multiple: of the block size, or 16 where no layer keeps tokens.
GRAINS = {"mamba2": 16, "qwen3-next": BLOCK_SIZE, "windowed": BLOCK_SIZE}


class WindowedRecurrent(MistralForCausalLM):
    """Sliding windows and a layer that keeps a state behind them."""

    def __init__(self, setup, options=None):
        super().__init__(setup, options)
        self.state = Decay(setup.build, "model.state", self.config.hidden_size)

    def forward(self, inputs, step):
        return self.state(super().forward(inputs, step), step=step)


def registry():
    """All that ships with frame, and the model above."""
    made, name = Registry.load(), "WindowedRecurrent"
    made.offers.append(Offer("model", Provider(name, f"{__name__}:{name}", api=f"=={API_VERSION}"), HERE, ""))
    return with_threads(made)


def write_model(folder, name, seed=0):
    """A checkpoint of one of `MODELS`."""
    if name != "windowed":
        return make_checkpoint(folder, name, seed=seed)
    make_checkpoint(folder, "mistral", seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["WindowedRecurrent"]}))
    return folder


def cached(name, sizes=SIZES):
    """Prompt tokens that need no computing once all is stored: whole grains, short of the last token."""
    return [(size - 1) // GRAINS[name] * GRAINS[name] for size in sizes]


def prompts(shift=0, sizes=SIZES):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(sizes)]


@contextmanager
def engine_of(model, connector=None, options=None, **settings):
    """An engine of small blocks; the executor "threads" is there for several ranks."""
    plain = {**SMALL, "model": str(model), "block_size": BLOCK_SIZE, "num_threads": 1, "max_num_seqs": 8, **settings}
    if connector is not None:
        plain |= {"kv_connector": connector, "plugin": {connector: options or {}}}
    with running(from_flat(plain), registry()) as engine:
        yield engine


def complete(engine, given, label="r"):
    """(output tokens of each prompt, prompt tokens that were not computed)."""
    outputs = drain(engine, [request(f"{label}{index}", prompt, 10) for index, prompt in enumerate(given)])
    found = [outputs[f"{label}{index}"] for index in range(len(given))]
    return [tokens_of(one) for one in found], [one[0].num_cached for one in found]
