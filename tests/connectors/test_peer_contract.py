"""The contract of connectors for `peer`, whose storage is the engines that computed something and still run."""

from __future__ import annotations

import itertools
import threading

import pytest

from frame.testing import ConnectorSuite
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout


@pytest.mark.some(1)
class TestPeers(ConnectorSuite):
    plugin = "peer"

    @property
    def shares(self):
        return True

    @pytest.fixture(autouse=True)
    def _engines_that_stay(self, _own_folder):
        self.numbers, self.lock = itertools.count(), threading.Lock()
        self.addresses, self.staying = [], []
        yield
        for engine in self.staying:
            engine.close()

    def engine(self, *args, **settings):
        """Each engine listens on a socket of its own and asks all that stay."""
        address = f"unix:{self.folder}/{next(self.numbers)}"
        with self.lock:
            self.options = {"listen": address, "peers": list(self.addresses), "lookup_seconds": 20}
            made = super().engine(*args, **settings)
        made.address = next(str(side.inner._server._address) for side in made.sides if side.inner.rank == 0)
        return made

    def fill(self, *prompts, layout=None, **settings):
        """As the suite's, by an engine that stays until the end of the test."""
        engine = self.engine(layout, **settings)
        self.staying.append(engine)
        engine.run(*(request(f"fill-{index}", prompt) for index, prompt in enumerate(prompts)))
        engine.check()
        self.serves(engine)

    def serves(self, engine):
        """Engines that are made later ask it."""
        self.addresses.append(engine.address)

    def damage_one(self, draw):
        """One worker says that it holds a block, and does not send it."""
        blocks = draw.choice(self.staying[-1].sides).inner._blocks
        missing, get, asked = draw.choice(list(blocks._blocks)), blocks.get, itertools.count()
        blocks.get = lambda key: None if key == missing and next(asked) % 2 else get(key)
        return True

    def test_a_real_model_gives_the_same_logits(self):
        pytest.skip("tests/connectors/test_peer_engine.py has two engines that run at once")

    def test_a_real_model_on_two_ranks_gives_the_same_tokens(self):
        pytest.skip("tests/connectors/test_peer_engine.py has two engines that run at once")

    def test_blocks_that_are_damaged_are_computed_again(self):
        pytest.skip("tests/connectors/test_peer.py has peers that lie")

    def test_bytes_and_hits_are_counted_and_the_start_says_what_is_kept(self, caplog):
        caplog.set_level("INFO", "frame")
        prompt = self.prompt(22)
        self.fill(prompt)
        assert f"each worker keeps 1 GiB of them for peers, from unix:{self.folder}/0 on" in caplog.text
        engine = self.engine()
        assert "peers that are asked: 1;" in caplog.text
        engine.run(request("again", prompt))
        engine.check()
        grain = engine.layout.grain
        told, size = engine.engine.stats(), engine.sides[0].inner.tokens.num_bytes
        blocks = (len(prompt) - 1) // grain
        assert told.connector_counters["peer_load_bytes"] == blocks * size
        assert told.connector_counters["peer_hit_tokens"] == blocks * grain
        assert told.connector_counters["peer_lookup_tokens"] == len(prompt) // grain * grain
        kept = self.staying[0].engine.stats()
        assert kept.connector_counters["peer_save_bytes"] == len(prompt) // grain * size
        assert kept.connector_gauges["peer_used_bytes"] == len(prompt) // grain * size
        assert kept.connector_gauges["peer_size_bytes"] == 1 << 30
        engine.close()

    @pytest.mark.parametrize("sharing", [False, True])
    def test_data_ranks_of_one_setting_listen_beside_one_another(self, sharing):
        self.options = {"listen": f"unix:{self.folder}/one"}
        settings = {"data_parallel_size": 2, "enable_expert_parallel": sharing, "tensor_parallel_size": 2}
        sides = []
        for data_rank in range(2):
            config = self.config(kv_connector="peer", data_parallel_rank=data_rank, **settings)
            sides += [self.worker_side(config, make_layout(ranks=2), rank) for rank in range(2)]
        addresses = [str(side._server._address) for side in sides]
        for side in sides:
            side.close()
        assert addresses == [f"unix:{self.folder}/{name}" for name in ("one", "one.1", "one.2", "one.2.1")]
