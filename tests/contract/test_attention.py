import pytest

from frame.testing import AttentionBackendSuite, ReferenceAttention
from tests.contract.installed import classes

pytestmark = pytest.mark.product

globals().update(classes(AttentionBackendSuite))


class TestReference(AttentionBackendSuite):
    target = f"{ReferenceAttention.__module__}:ReferenceAttention"
