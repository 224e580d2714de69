"""What is shown while weights load."""

from __future__ import annotations

import logging
import re

import pytest

from frame.core.interfaces.loader import fill_each
from frame.core.worker.start.load_progress import LoadProgress
from frame.testing.checkpoints import make_checkpoint
from tests.loaders.test_sharded_state import served


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_a_bar_only_where_there_is_a_terminal(terminal, shown, monkeypatch, capsys):
    import torch

    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    progress = LoadProgress(fill_each, shown=shown)
    targets = [torch.zeros(100) for _ in range(3)]
    progress.fill((target, lambda: torch.ones(100)) for target in targets)
    assert all(bool((target == 1).all()) for target in targets)
    assert progress._bar.disable == (not (terminal and shown))
    if terminal and shown:
        assert (progress._bar.n, progress._bar.total) == (1200, 1200)
    progress.report(1200, 0)
    assert ("weights: " in capsys.readouterr().err) == (terminal and shown)


def test_bytes_and_seconds_are_logged(tmp_path, caplog):
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=1)
    with caplog.at_level(logging.INFO, logger="frame"):
        served(plain, count=1, use_tqdm_on_load=False)
    assert re.search(r"rank 0: read 0\.00 GB of weights in \d+\.\d\d s, \d+\.\d GB/s", caplog.text)
