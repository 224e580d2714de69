from frame.testing import QuantizationSuite
from tests.contract.coded_experts import TestCoded as TestCoded
from tests.contract.installed import classes
from tests.contract.quantizations import TestRounded as TestRounded

globals().update(classes(QuantizationSuite))
