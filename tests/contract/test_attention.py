import pytest

from frame.testing import AttentionBackendSuite, IndexBackendSuite, LatentBackendSuite, ReferenceAttention
from tests.contract.installed import classes

pytestmark = pytest.mark.product

for _suite in (AttentionBackendSuite, LatentBackendSuite, IndexBackendSuite):
    globals().update(classes(_suite))


class TestReference(AttentionBackendSuite):
    target = f"{ReferenceAttention.__module__}:ReferenceAttention"
