from frame.testing import AttentionBackendSuite


class TestTorch(AttentionBackendSuite):
    plugin = "torch"


class TestTriton(AttentionBackendSuite):
    plugin = "triton"
