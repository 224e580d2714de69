"""The contract for backends around foreign functions: by stand-ins on a CPU; test_attention.py runs the real ones."""

from frame.testing import AttentionBackendSuite

HERE = "tests.plugins.attention.stand_ins"


class TestFlashThree(AttentionBackendSuite):
    target = f"{HERE}:FlashThreeOnCpu"
    device_type = "cpu"


class TestFlashFour(AttentionBackendSuite):
    target = f"{HERE}:FlashFourOnCpu"
    device_type = "cpu"


class TestFlashTwo(AttentionBackendSuite):
    target = f"{HERE}:FlashTwoOnCpu"
    device_type = "cpu"


class TestCudnn(AttentionBackendSuite):
    target = f"{HERE}:CudnnOnCpu"
    device_type = "cpu"
