"""Engines whose layers are divided into pipeline stages give the tokens of one worker."""

from itertools import pairwise

import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, greedy, mixed_requests, prompts, request, running, tokens_of
from frame.testing.families import FAMILIES
from frame.testing.thread_executor import with_threads

#: One family for each way in which a stage may end.
TRAITS = {"llama": "partial sums", "llama-tied": "tied head", "qwen3-moe": "experts", "gpt2": "positions", "gemma2": ""}
#: Families whose layers need more of each other than a stage hands on.
UNDIVIDED = [family for family in FAMILIES if family.startswith(("gemma3n", "gemma4"))]


def tokens(folder, stages=1, tensor=1, serve=greedy, executor="threads", **settings):
    values = {**SMALL, "model": str(folder), "num_threads": 1, **settings}
    if stages * tensor > 1:
        values |= {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor, "executor": executor}
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        return serve(engine, prompts(400))


@pytest.mark.parametrize("family", TRAITS)
def test_two_stages_give_the_tokens_of_one(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2) == tokens(tmp_path)


@pytest.mark.some(2)
@pytest.mark.parametrize(("stages", "tensor"), [(4, 1), (2, 2), pytest.param(3, 2, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("serve", [greedy, mixed_requests])
def test_several_stages(stages, tensor, serve, tmp_path):
    make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    assert tokens(tmp_path, stages, tensor, serve) == tokens(tmp_path, serve=serve)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["mamba2", "zamba2"])
@pytest.mark.parametrize(("stages", "executor"), [(2, "threads"), (2, "process")])
def test_states_that_were_kept_of_prefixes_are_found_in_every_stage(family, stages, executor, tmp_path):
    """Each request twice: the second time it goes on from copies that every worker must have made."""

    def twice(engine, given):
        found = greedy(engine, given), greedy(engine, given)
        assert engine.stats().prefix_hits > 0
        return found

    make_checkpoint(tmp_path, family)
    first, again = tokens(tmp_path, stages, serve=twice, executor=executor)
    assert first == again == tokens(tmp_path)


@pytest.mark.matrix
@pytest.mark.few_families
@pytest.mark.each_cache
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*TRAITS, *UNDIVIDED)])
def test_every_family_over_two_stages(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2) == tokens(tmp_path)


def test_a_family_that_cannot_be_divided_is_refused(tmp_path):
    make_checkpoint(tmp_path, UNDIVIDED[0])
    with pytest.raises(ConfigError, match="model Gemma3nForCausalLM cannot be divided into stages; use 1"):
        tokens(tmp_path, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("family", [family for family in TRAITS if family != "llama"])
def test_two_stages_of_two_ranks(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, 2, 2, mixed_requests) == tokens(tmp_path, serve=mixed_requests)


def test_workers_in_processes_of_their_own(tmp_path):
    make_checkpoint(tmp_path, "llama")
    assert tokens(tmp_path, 2, executor="process") == tokens(tmp_path)


def test_layers_as_the_user_divides_them(tmp_path):
    make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    assert tokens(tmp_path, 3, pipeline_layers=[1, 3, 1]) == tokens(tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_stage_that_lacks_a_kind_of_layer(family, tmp_path):
    """Of layers with windows and without, a stage of one layer has one kind."""
    make_checkpoint(tmp_path, family)
    layers = read_checkpoint(from_flat({"model": str(tmp_path)})).text["num_hidden_layers"]
    assert tokens(tmp_path, layers) == tokens(tmp_path)


def test_requests_that_end_after_one_token(tmp_path):
    """Their slots may not be planned again for long, and nobody waits for their tokens then."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=4)

    def serve(engine, given):
        return greedy(engine, [*given * 4], 1)

    assert tokens(tmp_path, 4, serve=serve, max_num_seqs=8) == tokens(tmp_path, serve=serve, max_num_seqs=8)


def fails_once(runner, name, number):
    """Has call `number` of a method of a runner raise."""
    method, calls = getattr(runner, name), []

    def called(*args, **values):
        calls.append(args)
        if len(calls) == number:
            raise RuntimeError("this call was to fail")
        return method(*args, **values)

    setattr(runner, name, called)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("rank", "method"), [(0, "_forward"), (1, "_forward"), (2, "_forward"), (2, "_draw"), (0, "_write"), (1, "_write")]
)
@pytest.mark.parametrize("number", [1, 4])
def test_a_stage_that_fails_does_not_keep_others_waiting(rank, method, number, tmp_path):
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    settings = {"async_scheduling": True}

    def serve(engine, given):
        fails_once(engine.executor.team[rank]._worker.runner, method, number)
        # draws with a filter are not those of decodes that a platform captures
        requests = [request(f"{place}", prompt, 12, top_k=5) for place, prompt in enumerate(given)]
        return {name: tokens_of(found) for name, found in drain(engine, requests).items()}

    def whole(engine, given):
        requests = [request(f"{place}", prompt, 12, top_k=5) for place, prompt in enumerate(given)]
        return {name: tokens_of(found) for name, found in drain(engine, requests).items()}

    assert tokens(tmp_path, 3, serve=serve, **settings) == tokens(tmp_path, serve=whole)


def test_idle_stages_share_decodes(tmp_path):
    """Every stage gets a part of the running requests in turn."""
    make_checkpoint(tmp_path, "llama")

    def serve(engine, given):
        plans = []
        schedule = engine.scheduler.schedule

        def noted(*args, **values):
            if (plan := schedule(*args, **values)) is not None and len(plan.slots):
                plans.append(sorted(plan.slots.tolist()))
            return plan

        engine.scheduler.schedule = noted
        greedy(engine, given[:4], 20)
        return plans

    plans = tokens(tmp_path, 2, serve=serve)
    decodes = [plan for plan in plans[2:-4] if len(plan) == 2]
    assert len(decodes) >= 30
    assert all(set(one).isdisjoint(other) for one, other in pairwise(decodes))
