from frame.testing import ConnectorSuite
from tests.contract.installed import classes

#: Tested elsewhere: the one over connectors that it needs (tests/connectors/test_multi_contract.py), the other makes
#: tokens up (tests/connectors/test_decode_bench.py).
ELSEWHERE = {"TestMulti", "TestDecodeBench"}

globals().update({name: made for name, made in classes(ConnectorSuite).items() if name not in ELSEWHERE})
