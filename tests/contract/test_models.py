import pytest

from frame.testing import ModelSuite
from frame.testing.families import FAMILIES
from tests.contract.installed import classes

_SHOWN = {row.architecture for row in FAMILIES.values() if not row.in_matrix}
_LEFT = {row.architecture for row in FAMILIES.values()} - _SHOWN

for _name, _suite in classes(ModelSuite).items():
    if _suite.plugin.rpartition(":")[2] in _LEFT:  # other rows show the traits of these
        _suite.pytestmark = [pytest.mark.slow]
    globals()[_name] = _suite
del _suite
