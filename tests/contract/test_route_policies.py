from frame.testing import RoutePolicySuite
from tests.contract.installed import classes

globals().update(classes(RoutePolicySuite))
