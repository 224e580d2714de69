from __future__ import annotations

import numpy as np
import pytest

from frame.interfaces import LoadRecord, LoadTrace, LoadTraceWriter, TraceHeader

HEADER = TraceHeader(num_layers=2, num_experts=3, num_groups=3, expert_bytes=7)
LOADS = np.array([[1, 2, 3], [4, 0, 1 << 52]])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "loads.jsonl"
    writer = LoadTraceWriter(path, HEADER)
    for step in (10, 20):
        writer.write(LoadRecord(LOADS * (step // 10), 9, step))
    writer.close()
    writer.close()
    return path


def test_what_was_written_is_read_as_often_as_wanted(path):
    trace = LoadTrace(path)
    assert trace.header == HEADER
    for _ in range(2):
        first, second = trace
        assert (first.loads.tolist(), second.loads.tolist()) == (LOADS.tolist(), (LOADS * 2).tolist())
        assert (first.step, first.num_steps, second.step) == (10, 9, 20)
        assert first.loads.dtype == np.int64


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data[:-4], "is cut off in line 3; remove that line to use the 2 before it"),
        (lambda data: data.split(b"\n")[0] + b"\n", "has no records"),
        (lambda data: b"", "its first line is wrong"),
        (lambda data: b"{}\n", "its first line is wrong"),
        (
            lambda data: data.replace(b'"version":1', b'"version":2'),
            "version 2, expected 'frame-expert-loads' version 1",
        ),
        (lambda data: data.replace(b'"num_layers":2', b'"num_layers":0'), "must be at least 1"),
        (lambda data: data.replace(b'"num_layers":2', b'"num_layers":9000000'), "above 1,048,576 in all"),
        (lambda data: data.replace(b'"num_layers":2', b'"num_layers":3'), "line 2 .* not 3 layers of 3 experts"),
        (lambda data: data.replace(b"[1,2,3]", b"[1,2]"), "line 2 .* not 2 layers of 3 experts"),
        (lambda data: data.replace(b"[1,2,3]", b"[1,-2,3]"), "line 2 .* not all between 0 and"),
        (lambda data: data.replace(b"[1,2,3]", b'[1,"x",3]'), "line 2 .* is no record: Expected `int`"),
        (lambda data: data.replace(b"[1,2,3]", b"[1,2,99999999999999999999]"), "line 2 .* is no record"),
    ],
)
def test_other_files_are_refused_in_one_sentence(path, spoil, said):
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=said) as error:
        list(LoadTrace(path))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read: No such file or directory"):
        LoadTrace(tmp_path / "none.jsonl")


def test_loads_of_another_shape_are_not_written(tmp_path):
    writer = LoadTraceWriter(tmp_path / "loads.jsonl", HEADER)
    with pytest.raises(ValueError, match=r"shape \[3, 2\], the trace has \[2, 3\]"):
        writer.write(LoadRecord(LOADS.T, 1, 1))
    writer.close()
