from frame.testing import ConnectorSuite
from tests.contract.installed import classes

globals().update(classes(ConnectorSuite))
