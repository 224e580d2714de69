from frame.testing import PoolerSuite
from tests.contract.installed import classes

globals().update(classes(PoolerSuite, step={"settings": {"step_tag_id": 7}}))
