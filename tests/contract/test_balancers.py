from frame.testing import ExpertBalancerSuite
from tests.contract.installed import classes

globals().update(classes(ExpertBalancerSuite))


class TestFixedPlacement(ExpertBalancerSuite):
    target = "frame.core.interfaces.balancer:FixedPlacement"
