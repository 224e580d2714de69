"""Access of a GPU's kernels to memory that torch allocated on another, by a driver that is made up."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from frame.kernels import peer_memory

ALREADY_ENABLED = 704


class Driver:
    """Contexts are 100 + the device's number. Notes what was enabled, and what is still held."""

    def __init__(self, *, reaches: bool = True, status: int = 0, num_devices: int = 2) -> None:
        self.reaches, self.status, self.num_devices = reaches, status, num_devices
        self.enabled: list[tuple[int, int]] = []
        self.current = [7]  # what the thread had
        self.retained: list[int] = []

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        if number >= self.num_devices:
            return 101
        device._obj.value = number
        return 0

    def cuDeviceCanAccessPeer(self, can, device, peer):
        can._obj.value = int(self.reaches and device.value != peer.value)
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.retained.append(device.value)
        context._obj.value = 100 + device.value
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        self.retained.remove(device.value)
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.current.pop()
        return 0

    def cuCtxEnablePeerAccess(self, context, flags):
        if self.status == 0:
            self.enabled.append((self.current[-1], context.value))
        return self.status

    def cuGetErrorString(self, status, said):
        said._obj.value = b"the driver's words"
        return 0


def use(monkeypatch: pytest.MonkeyPatch, **settings) -> Driver:
    made = Driver(**settings)
    monkeypatch.setattr(peer_memory, "driver", lambda: made)
    return made


def test_a_device_is_given_access_to_another_one(monkeypatch):
    driver = use(monkeypatch)
    peer_memory.enable_access(0, 1)
    assert driver.enabled == [(100, 101)], "in the context of the device whose kernels read"
    assert driver.current == [7]
    assert driver.retained == []


def test_access_that_is_enabled_already_is_fine(monkeypatch):
    driver = use(monkeypatch, status=ALREADY_ENABLED)
    peer_memory.enable_access(0, 1)
    assert driver.current == [7]


def test_devices_that_cannot_reach_each_other_are_named(monkeypatch):
    driver = use(monkeypatch, reaches=False)
    with pytest.raises(peer_memory.PeerMemoryError, match=r"^GPU 0 cannot read memory of GPU 1: nothing connects them"):
        peer_memory.enable_access(0, 1)
    assert driver.enabled == driver.retained == []


@pytest.mark.parametrize("status", [1, 217])
def test_what_the_driver_refuses_is_told(monkeypatch, status):
    driver = use(monkeypatch, status=status)
    with pytest.raises(peer_memory.PeerMemoryError, match=r"^cuCtxEnablePeerAccess: the driver's words"):
        peer_memory.enable_access(0, 1)
    assert driver.current == [7]
    assert driver.retained == []


def test_a_device_that_is_not_there(monkeypatch):
    use(monkeypatch, num_devices=1)
    with pytest.raises(peer_memory.PeerMemoryError, match=r"^cuDeviceGet: the driver's words"):
        peer_memory.enable_access(0, 1)
