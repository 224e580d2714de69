from frame.testing import ExecutorSuite
from tests.contract.installed import classes

globals().update(classes(ExecutorSuite))
