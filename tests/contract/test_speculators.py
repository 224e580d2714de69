from frame.testing import SpeculatorSuite
from tests.contract.installed import classes

globals().update(classes(SpeculatorSuite))
