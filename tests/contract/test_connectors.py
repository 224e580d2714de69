import pytest

from frame.testing import ConnectorSuite
from tests.contract.installed import classes

#: Tested elsewhere: the one over connectors that it needs (tests/connectors/test_multi_contract.py), the other makes
#: tokens up (tests/connectors/test_decode_bench.py).
ELSEWHERE = {"TestMulti", "TestDecodeBench"}

#: Without a secret or a server they exchange nothing; tests/connectors/test_*_contract.py has them with one.
ALONE = {"TestNixl", "TestPeer", "TestPush", "TestMooncake", "TestLmcache"}

for name, made in classes(ConnectorSuite).items():
    if name not in ELSEWHERE:
        globals()[name] = pytest.mark.matrix(made) if name in ALONE else pytest.mark.some(1)(made)
del name, made
