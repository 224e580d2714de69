import pytest

from frame.testing import ExpertExchangeSuite
from tests.contract.installed import classes

globals().update({name: pytest.mark.some(5)(made) for name, made in classes(ExpertExchangeSuite).items()})
