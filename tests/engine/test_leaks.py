"""A few dozen mixed requests with aborts leave an engine as they found it."""

from frame.testing.checkpoints import make_checkpoint
from tests.engine.leaks import check_nothing_is_kept


def test_blocks_and_slots_come_back(tmp_path):
    """Two KV groups (a window and full attention), too few blocks for all, so that some are preempted."""
    folder = str(make_checkpoint(tmp_path, "gemma2"))
    settings = {"max_model_len": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 60, "num_threads": 1}
    check_nothing_is_kept(folder, 40, vocab_size=512, longest=60, **settings)
