from frame.testing import PlatformSuite
from tests.contract.installed import classes

globals().update(classes(PlatformSuite))
