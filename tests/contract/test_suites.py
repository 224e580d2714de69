"""The suites find what they are there to find: each of these plugins is wrong in one way."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from frame import testing
from frame.core.plugin_host.kinds import KINDS
from frame.testing.contract_run import run_suite
from frame.testing.suites import SUITES
from tests.contract import wrong_more

HERE = "tests.contract.wrong"
KEEPING = "tests.contract.keeping"
MORE = "tests.contract.wrong_more"
BALANCERS = "tests.contract.wrong_balancers"
TIERS = "tests.contract.wrong_tier_policies"
ROUTING = "tests.contract.wrong_routing"
EXCHANGES = "tests.contract.wrong_exchanges"
ADAPTERS = "tests.contract.wrong_adapters"
QUANTIZATIONS = "tests.contract.wrong_quantizations"
CALL, THOUGHT = {"example": wrong_more.CALL}, {"example": wrong_more.THOUGHT}
CODED = {"quantization_config": '{"quant_method": "coded"}'}
LLAMA = {"tiny": f"{MORE}:write_llama"}
BOOST = {"extra_args": '{"boost": [3, 2.0]}'}


@pytest.mark.some(30)
@pytest.mark.parametrize(
    ("kind", "target", "check", "tags"),
    [
        ("processor", "tests.contract.processors:Leaky", "a reused slot starts anew", BOOST),
        ("processor", "Spreading", "only rows that opted in change", BOOST),
        ("processor", "Liar", "it keeps the most likely token when it says so", BOOST),
        ("scheduler", "Moody", "keys depend on the request alone", {}),
        ("scheduler", "Careless", "looking changes nothing", {}),
        ("balancer", f"{BALANCERS}:Homeless", "every expert gets a slot and every slot an expert", {}),
        ("balancer", f"{BALANCERS}:Miscounting", "every expert gets a slot and every slot an expert", {}),
        ("balancer", f"{BALANCERS}:Wandering", "placements depend on the arguments alone", {}),
        ("balancer", f"{BALANCERS}:InPlace", "looking changes nothing", {}),
        ("balancer", f"{BALANCERS}:Gathering", "placements of a start get no worse", {}),
        ("tier-policy", f"{TIERS}:Grabbing", "only what is held and not in use goes", {}),
        ("tier-policy", f"{TIERS}:Clinging", "only what is held and not in use goes", {}),
        ("tier-policy", f"{TIERS}:Fickle", "choices depend on the calls alone", {}),
        ("route-policy", f"{ROUTING}:Faithful", "it names a server that it is given", {}),
        ("route-policy", f"{ROUTING}:Counting", "looking changes nothing", {}),
        ("route-policy", f"{ROUTING}:Picky", "any request is routed", {}),
        ("route-policy", f"{ROUTING}:Trusting", "any request is prepared", {}),
        ("route-policy", f"{ROUTING}:Strict", "any change of a cache is taken while requests are routed", {}),
        ("route-policy", f"{ROUTING}:Talkative", "figures are numbers with plain names", {}),
        ("route-policy", f"{ROUTING}:Selfish", "prompts are computed where they can be", {}),
        ("exchange", f"{EXCHANGES}:Staying", "tokens get what all experts give", {}),
        ("exchange", f"{EXCHANGES}:Equal", "what is sent comes back weighed", {}),
        ("exchange", f"{EXCHANGES}:Twice", "tokens get what all experts give", {}),
        ("exchange", f"{EXCHANGES}:Trusting", "another number of tokens than agreed is refused", {}),
        ("extension", "tests.contract.wrong_extensions:Silent", "its methods can be called by names of their own", {}),
        (
            "extension",
            "tests.contract.wrong_extensions:Raw",
            "every rank answers in plain data",
            {"calls": '{"weight": {}}'},
        ),
        ("extension", "tests.contract.wrong_extensions:Shrinking", "outputs are those of an engine without it", {}),
        ("adapters", f"{ADAPTERS}:Always", "without adapters a layer is as it was", {}),
        ("adapters", f"{ADAPTERS}:Blind", "what is no adapter is refused in one sentence", {}),
        ("adapter-resolver", f"{ADAPTERS}:Raising", "odd names are unknown", {}),
        ("adapter-resolver", f"{ADAPTERS}:Anything", "odd names are unknown", {}),
        ("quantization", f"{QUANTIZATIONS}:Moving", "layers keep sizes and addresses", {}),
        ("quantization", f"{QUANTIZATIONS}:Deaf", "fused forms give what apart gives", {}),
        ("quantization", f"{QUANTIZATIONS}:Coarse", "weights that are quantised while loading stay near", {}),
        ("quantization", f"{QUANTIZATIONS}:PerShare", "shares of two ranks give the whole", {}),
        ("quantization", f"{QUANTIZATIONS}:Biasless", "the bias of a layer is added", {}),
        ("quantization", f"{QUANTIZATIONS}:Widening", "results are of the models type", {}),
        ("quantization", f"{QUANTIZATIONS}:Hoarding", "memory is in parameters alone", {}),
        ("quantization", f"{QUANTIZATIONS}:Mixing", "rows of deterministic steps do not heed each other", {}),
        ("quantization", f"{QUANTIZATIONS}:Busy", "a product takes any number of rows", {}),
        ("quantization", f"{QUANTIZATIONS}:FirstShare", "experts of two ranks give the whole", {}),
        ("quantization", f"{QUANTIZATIONS}:Wandering", "experts keep sizes and addresses", {}),
        ("quantization", f"{QUANTIZATIONS}:Leaving", "rows hold all that belongs to experts", {}),
        ("quantization", f"{QUANTIZATIONS}:Swapped", "matrices of experts are what apply multiplies by", {}),
        ("quantization", f"{QUANTIZATIONS}:Unlike", "weights that are quantised while loading stay near", {}),
        ("quantization", f"{QUANTIZATIONS}:FirstRows", "a vocabulary of two ranks gives the whole", {}),
        ("quantization", f"{QUANTIZATIONS}:Shrunk", "a vocabulary is looked up as it is multiplied", {}),
        ("quantization", f"{QUANTIZATIONS}:Restless", "numerics follow from the setup alone", {}),
        ("quantization", f"{QUANTIZATIONS}:Routers", "exact layers are left", {}),
        ("quantization", f"{QUANTIZATIONS}:Elsewhere", "layers of another stage take no memory", {}),
        ("quantization", f"{QUANTIZATIONS}:Clipping", "what layers are given stays as it is", {}),
        ("quantization", f"{QUANTIZATIONS}:OwnOnly", "every rank has slots for the tensors of all experts", CODED),
        ("quantization", f"{QUANTIZATIONS}:LlamaOnly", "other experts are computed or refused", CODED),
        ("speculator", "Peeking", "what lies behind the known tokens is not read", {}),
        ("command", "Heavy", "nothing heavy is imported before run", {}),
        ("source", f"{MORE}:Raising", "supports gives reasons and never raises", {}),
        ("source", f"{MORE}:Inventing", "what was never fetched is one sentence when offline", {}),
        ("loader", "Sloppy", "slices are read as of the whole", {}),
        ("loader", "Forgetful", "every tensor comes once with its facts", {}),
        ("endpoint", "Fragile", "wrong bodies are the clients fault", {}),
        ("attention", "Greedy", "supports gives reasons and never raises", {}),
        ("attention", "Windowless", "a step equals the reference", {}),
        ("attention", "Scribbler", "nothing is written outside the tokens slots", {}),
        ("attention", "Overwriting", "padding reaches no real token", {}),
        ("attention", "Broadcast", "padding reaches no real token", {}),
        ("attention", "Believing", "captured decodes serve shorter rows and padding", {}),
        ("attention", "Polluted", "nan left by another request does not spread", {}),
        ("executor", "Impatient", "steps reach every worker and answers keep their order", {}),
        ("executor", "Leaving", "closing twice closes every worker", {}),
        (
            "connector",
            f"{KEEPING}:Unaligned",
            "a reloaded prompt gives the tokens of a cold one",
            {"worker": f"{KEEPING}:Keeper"},
        ),
        (
            "connector",
            f"{KEEPING}:Keeping",
            "a step that failed publishes nothing",
            {"worker": f"{KEEPING}:EarlyKeeper"},
        ),
        pytest.param(
            "connector",
            f"{KEEPING}:Holding",
            "a reloaded prompt gives the tokens of a cold one",
            {"worker": f"{KEEPING}:Keeper"},
            marks=pytest.mark.matrix,
        ),
        (
            "connector",
            f"{KEEPING}:Keeping",
            "a reloaded prompt gives the tokens of a cold one",
            {"worker": f"{KEEPING}:Mixing"},
        ),
        ("platform", "Aliasing", "staged arrays arrive and may be reused", {}),
        ("platform", "Rounding", "ops equal their references", {}),
        ("platform", f"{MORE}:NewOps", "every op is there", {}),
        ("platform", f"{MORE}:Hasty", "the main queue waits for a mark", {}),
        ("platform", f"{MORE}:Mutating", "ops equal their references", {}),
        ("scheduler", f"{MORE}:Partial", "keys are tuples that can be compared", {}),
        ("speculator", f"{MORE}:Scribbling", "looking changes nothing", {}),
        ("command", f"{MORE}:Loud", "help is one line", {}),
        ("loader", f"{MORE}:Eager", "nothing is read before it is asked for", {}),
        ("endpoint", f"{MORE}:Failing", "reading routes answer", {}),
        ("executor", f"{MORE}:Swapping", "steps reach every worker and answers keep their order", {}),
        ("sink", f"{MORE}:Blocking", "it does not wait", {}),
        ("sink", f"{MORE}:Strict", "every report is taken", {}),
        ("pooler", f"{MORE}:AnyEnd", "rows do not depend on the batch", {}),
        ("pooler", f"{MORE}:Remembering", "a slot starts anew", {}),
        ("grammar", f"{MORE}:OneMatcher", "matchers of a grammar are apart", {}),
        ("grammar", f"{MORE}:Lax", "what the mask forbids is refused", {}),
        ("tokenizer", f"{MORE}:Forging", "chats cannot forge special tokens", {}),
        ("tokenizer", f"{MORE}:Trusting", "supports gives reasons and never raises", {}),
        ("tokenizer", f"{MORE}:Trimming", "pieces join to the text", {"tiny": f"{MORE}:write_words"}),
        ("tool-parser", f"{MORE}:Losing", "text beside the example is not lost", CALL),
        ("tool-parser", f"{MORE}:Piecewise", "pieces do not matter", CALL),
        ("reasoning-parser", f"{MORE}:Forgetting", "plain text stays content", THOUGHT),
        ("reasoning-parser", f"{MORE}:OneReader", "readers do not share state", THOUGHT),
        ("model", "tests.contract.recurrent:Forgetful", "chunks give the logits of the whole", LLAMA),
        ("model", f"{MORE}:Halved", "tokens equal the reference", LLAMA),
        ("model", f"{MORE}:Undivided", "two ranks give the logits of one", LLAMA),
        ("model", f"{MORE}:Unread", "tokens equal the reference", {"tiny": f"{MORE}:write_t5"}),
        ("model", f"{MORE}:Neighbourly", "tokens do not depend on the batch", LLAMA),
    ],
)
def test_a_wrong_plugin_fails_the_check_meant_for_it(kind, target, check, tags):
    options = {"options_model": f"{KEEPING}:Options", "patience_seconds": 0.2} if kind == "connector" else {}
    target = target if ":" in target else f"{HERE}:{target}"
    outcomes = run_suite(kind, only=check, target=target, tags=tags, **options)
    failed = {outcome.name for outcome in outcomes if outcome.status == "failed"}
    others = [outcome for outcome in outcomes if outcome.status != "passed"]
    assert check in failed, others
    assert not any("TypeError" in outcome.reason for outcome in others), others


def test_what_gives_nothing_is_told_what_is_due():
    reasons = {
        outcome.name: outcome.reason
        for outcome in run_suite("route-policy", target="tests.contract.wrong_routing:Silent")
        if outcome.status == "failed"
    }
    assert reasons == {
        "prompts are computed where they can be": "route must give a Route, gave None",
        "any change of a cache is taken while requests are routed": "route must give a Route, gave None",
        "figures are numbers with plain names": "figures must give names → numbers, gave None",
    }


@cache
def run_keeping(name):
    tags, options = {"worker": f"{KEEPING}:Keeper"}, f"{KEEPING}:Options"
    return run_suite("connector", target=f"{KEEPING}:{name}", tags=tags, options_model=options)


@pytest.mark.matrix
def test_a_right_one_passes_and_gives_reasons_for_what_it_skips():
    outcomes = run_keeping("Keeping")
    assert [outcome for outcome in outcomes if outcome.status == "failed"] == []
    skipped = [outcome for outcome in outcomes if outcome.status == "skipped"]
    assert {outcome.name for outcome in skipped} == {
        "blocks that are damaged are computed again",
        "what one rank lacks is computed on all",
        *(  # of layers that keep a state
            "a reloaded prompt gives the tokens of a cold one",
            "a step that failed publishes nothing",
            "a state is stored with the prefix that it stands for",
            "a state or block that is damaged is computed again",
            "random lives with states",
            "two ranks give the tokens of one",
        ),
    }
    assert all(outcome.reason for outcome in skipped)


@pytest.mark.parametrize(
    ("later", "hold"),
    [
        pytest.param(False, False, marks=pytest.mark.matrix),
        pytest.param(True, False, marks=pytest.mark.matrix),
        pytest.param(True, True, marks=pytest.mark.matrix),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_loads_may_be_late_and_blocks_held(later, hold):
    outcomes = run_keeping(("Late" if later else "Keeping") + ("Sender" if hold else ""))
    assert [outcome for outcome in outcomes if outcome.status == "failed"] == []


def test_frame_imports_no_pytest():
    code = "import sys, frame, frame.testing, frame.interfaces; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_kind_has_a_suite_that_teaches_its_use():
    assert set(SUITES) == set(KINDS)
    for kind, suite in SUITES.items():
        assert suite.kind == kind
        assert f"({suite.__name__}):" in suite.__doc__, f"the docstring of {suite.__name__} shows no subclass"
        assert suite.__name__ in dir(testing)


def test_each_kind_has_two_wrong_plugins_that_its_suite_finds():
    marks = test_a_wrong_plugin_fails_the_check_meant_for_it.pytestmark
    (mark,) = (one for one in marks if one.name == "parametrize")
    found = Counter(getattr(case, "values", case)[0] for case in mark.args[1])
    assert set(found) == set(KINDS)
    assert min(found.values()) >= 2, found
