from frame.testing import WeightLoaderSuite
from tests.contract.installed import classes

globals().update(classes(WeightLoaderSuite))
