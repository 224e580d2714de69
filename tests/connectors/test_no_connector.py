"""An engine without a KV connector that is asked to hand KV over, or to fetch it."""

from frame.core.config.flat import from_flat
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.testing.engines import drain, fake_engine, request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_executor import FakeExecutor, FakeWorkers
from frame.testing.fake_worker import FakeWorker
from frame.testing.setups import make_setup


def test_params_that_have_no_effect_are_said_once(caplog):
    config = from_flat({"max_num_seqs": 4, "max_num_batched_tokens": 64})
    layout = make_layout(50)
    workers = FakeWorkers(lambda rank: FakeWorker(layout))
    executor = FakeExecutor(make_setup("executor", config=config, workers=workers))
    policy = FirstComeFirstServedPolicy(make_setup("scheduler", config=config))
    engine = fake_engine(config, executor, policy, layout)
    plain, asking = [request(f"plain-{number}", [1, 2, 3], 2) for number in range(2)], []
    for number in range(2):
        asking.append(request(f"asking-{number}", [1, 2, 3], 2))
        asking[-1].kv_transfer = {"do_remote_prefill": True}
    drain(engine, plain)
    assert not caplog.records
    drain(engine, asking)
    assert [record.getMessage() for record in caplog.records] == [
        "kv_transfer_params of requests have no effect: this engine has no --kv-connector"
    ]
