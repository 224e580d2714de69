from __future__ import annotations

import hashlib
import subprocess
import sys
from array import array

import msgspec
import numpy as np
import pytest
import xxhash

from frame.core.engine.cache import hashing
from frame.core.engine.cache.hashing import BlockHasher
from frame.core.interfaces.engine import PromptEmbeds
from frame.core.interfaces.kv import KVLayout

GOLDEN = "7307a470a5acf0a245232ea84e3e898133f0af6ad6acba766b483816e2a20491"
SCRIPT = """
from array import array
from frame.core.engine.cache.hashing import BlockHasher
from frame.core.interfaces.kv import KVLayout
hasher = BlockHasher("sha256", KVLayout(groups=(), pools=(2,), block_size=4, grain=4, model="llama bfloat16"))
hashes = []
hasher.extend(hashes, hasher.root(salt="s", adapter="a", media_keys=["m"]), array("i", range(10)), 2)
print(hashes[1].hex())
"""


def chain(hasher: BlockHasher, ids: list[int], **root: object) -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, hasher.root(**root), array("i", ids), len(ids) // 4)
    return hashes


def make(algorithm: str = "sha256", **names: str) -> BlockHasher:
    layout = KVLayout(groups=(), pools=(2,), block_size=4, grain=4, **{"model": "m", "numerics": "n", **names})
    return BlockHasher(algorithm, layout)


def test_hashes_are_the_same_in_every_process():
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == GOLDEN


def test_a_request_is_not_deterministic_unless_it_says_so():
    hasher = make()
    assert hasher.root(deterministic=None) == hasher.root() != hasher.root(deterministic=True)


def test_a_hash_covers_all_tokens_before_it():
    one, two = chain(make(), [1, 2, 3, 4, 5, 6, 7, 8]), chain(make(), [1, 2, 3, 9, 5, 6, 7, 8])
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert chain(make(), [1, 2, 3, 4]) == one[:1]


@pytest.mark.parametrize("size", [1, 16, 64, 16384])
@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_a_hash_is_over_msgpack_of_the_one_before_and_the_ids(algorithm, size):
    """The lengths of ids of so many tokens need 1, 1, 2 and 4 bytes of msgpack."""
    layout = KVLayout(groups=(), pools=(2,), block_size=size, grain=size, model="m")
    digest = {"sha256": lambda data: hashlib.sha256(data).digest(), "xxhash": xxhash.xxh3_128_digest}[algorithm]
    hasher, ids = BlockHasher(algorithm, layout), array("i", range(5 * size))
    wanted = [hasher.root()]
    for start in range(0, len(ids), size):
        block = np.array(ids[start : start + size], "<i4").tobytes()
        wanted.append(digest(msgspec.msgpack.encode([wanted[-1], block])))
    found: list[bytes] = []
    hasher.extend(found, hasher.root(), ids, 2)
    hasher.extend(found, hasher.root(), ids, 5)
    assert found == wanted[1:]
    named: list[bytes] = []
    hasher.extend(named, b"a root", ids, 2)
    assert named[0] == digest(msgspec.msgpack.encode([b"a root", np.array(ids[:size], "<i4").tobytes()]))
    assert named[1] == digest(msgspec.msgpack.encode([named[0], np.array(ids[size : 2 * size], "<i4").tobytes()]))


def test_extending_hashes_no_block_twice():
    hasher, ids = make(), array("i", range(16))
    whole: list[bytes] = []
    hasher.extend(whole, hasher.root(), ids, 4)
    parts: list[bytes] = []
    for count in (1, 3, 4, 2):
        hasher.extend(parts, hasher.root(), ids, count)
    assert parts == whole


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "x"},
        {"salt": ""},
        {"adapter": "x"},
        {"media_keys": ["x"]},
        {"media_keys": ["x", "y"]},
        {"media_keys": ["xy"]},
        {"deterministic": True},
        {"encoder": b"1234"},
    ],
)
def test_whatever_decides_a_blocks_content_decides_its_hash(change):
    others = [chain(make(), [1, 2, 3, 4]), chain(make(model="other"), [1, 2, 3, 4])]
    others.append(chain(make(algorithm="xxhash"), [1, 2, 3, 4]))
    found = chain(make(), [1, 2, 3, 4], **change)
    assert all(found != other for other in others)
    assert others[0] != others[1]


def test_numerics_decide_the_hashes_of_deterministic_requests_alone():
    """Engines that divide a model otherwise share what need not be equal to the last bit."""
    here, elsewhere = make(), make(numerics="other")
    assert chain(here, [1, 2, 3, 4]) == chain(elsewhere, [1, 2, 3, 4])
    exact = [chain(one, [1, 2, 3, 4], deterministic=True) for one in (here, elsewhere)]
    assert exact[0] != exact[1]


def test_embeddings_are_covered_where_they_stand():
    def hashed(rows, places):
        embeds = PromptEmbeds(rows=np.array(rows, np.float32), places=np.array(places, np.int32))
        hashes: list[bytes] = []
        ids = array("i", [-1 if place in places else place for place in range(8)])
        make().extend(hashes, make().root(), ids, 2, embeds)
        return hashes

    one, two = hashed([[1.0], [2.0]], [1, 5]), hashed([[1.0], [3.0]], [1, 5])
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert hashed([[2.0], [2.0]], [1, 5])[0] != one[0]
    assert hashed([[2.0]], [5])[0] == chain(make(), list(range(8)))[0]


def test_unknown_and_missing_algorithms_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="no block hash 'md5'; there are: sha256, xxhash"):
        make(algorithm="md5")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(hashing, "import_module", missing)
    with pytest.raises(RuntimeError, match="needs the package xxhash"):
        make(algorithm="xxhash")
