"""What the suite of connectors finds wrong is kept, as an engine goes on without a connector that raises."""

from types import SimpleNamespace

import pytest

from frame.interfaces import RequestView
from frame.testing.checked_connector import CheckedConnector
from frame.testing.fake_cache import make_layout


def test_a_wrong_answer_is_kept_as_a_fault():
    setup = SimpleNamespace(layout=make_layout())
    answers = {"matched_tokens": lambda *_: (2, False), "reads_hashes": True}
    checked = CheckedConnector(SimpleNamespace(setup=setup, options=None, **answers))
    view = RequestView(request_id="a", token_ids=list(range(22)), block_hashes=[], prompt_len=22)
    with pytest.raises(AssertionError):
        checked.matched_tokens(view, 0)
    (fault,) = checked.faults
    assert fault.startswith("matched_tokens: n must be a multiple of the layout's grain")
