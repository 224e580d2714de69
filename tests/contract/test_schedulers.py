from frame.testing import SchedulerPolicySuite
from tests.contract.installed import classes

globals().update(classes(SchedulerPolicySuite))
