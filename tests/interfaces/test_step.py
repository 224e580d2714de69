import numpy as np
import pytest

from frame.interfaces import TokenMasks


@pytest.mark.parametrize(("rows", "width"), [(3, 2), (1, 1), (0, 4)])
def test_masks_survive_packing(rows, width):
    words = np.arange(rows * width, dtype=np.int32).reshape(rows, width) - 3
    given = TokenMasks(slots=np.arange(rows, dtype=np.int32)[::-1], words=words[::-1])
    found = TokenMasks.unpacked(given.packed())
    assert found.slots.tolist() == given.slots.tolist()
    assert found.words.tolist() == given.words.tolist()
    assert found.words.shape == (rows, width)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\1\0\0\0\1\0\0\0", b"\1\0\0\0\1\0\0\0" + bytes(9)])
def test_masks_of_another_length_are_refused(data):
    with pytest.raises(ValueError, match=f"{len(data)} bytes are not the masks"):
        TokenMasks.unpacked(data)
