import pytest

from frame.testing import ModelSuite
from frame.testing.families import FAMILIES
from tests.contract.installed import classes
from tests.family_cases import CACHES

_LEFT = {row.architecture for row in FAMILIES.values()} - {FAMILIES[name].architecture for name in CACHES}

for _name, _suite in classes(ModelSuite).items():
    if _suite.plugin.rpartition(":")[2] in _LEFT:  # these keep what others keep
        _suite.pytestmark = [pytest.mark.slow]
    globals()[_name] = _suite
del _suite
