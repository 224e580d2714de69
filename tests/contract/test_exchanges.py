from frame.testing import ExpertExchangeSuite
from tests.contract.installed import classes

globals().update(classes(ExpertExchangeSuite))
