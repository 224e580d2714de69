from frame.testing import ModelSuite
from tests.contract.installed import classes

globals().update(classes(ModelSuite))
