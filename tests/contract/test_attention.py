from frame.testing import AttentionBackendSuite, ReferenceAttention
from tests.contract.installed import classes

globals().update(classes(AttentionBackendSuite))


class TestReference(AttentionBackendSuite):
    target = f"{ReferenceAttention.__module__}:ReferenceAttention"
