import pytest

from frame.testing import ExecutorSuite
from tests.contract.installed import classes
from tests.free_ports import free_ports

#: Its workers are processes of a cluster, which tests/executors/test_ray.py starts.
ELSEWHERE = {"TestRay"}

globals().update({name: made for name, made in classes(ExecutorSuite).items() if name not in ELSEWHERE})


@pytest.fixture(autouse=True)
def launched(request, monkeypatch):
    """What torchrun tells the only process that it starts, for the executor that is for its processes."""
    if request.cls is None or request.cls.plugin != "frame-llm:external":
        return
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
