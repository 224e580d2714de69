from frame.testing import LogitsProcessorSuite

HERE = "tests.contract.processors"
TAGS = {"extra_args": '{"boost": [3, 2.0]}'}


class TestBoost(LogitsProcessorSuite):
    target = f"{HERE}:Boost"
    tags = TAGS


class TestNoRepeat(LogitsProcessorSuite):
    target = f"{HERE}:NoRepeat"
    tags = TAGS


class TestDenseBoost(LogitsProcessorSuite):
    target = f"{HERE}:DenseBoost"
    tags = TAGS
