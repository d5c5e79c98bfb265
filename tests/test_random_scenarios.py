"""Whatever runs beside it and however the engine is set, a greedy or seeded request returns the tokens of its solo run.

The short form belongs to every test run, the long one to `make soak`. A failure names its seed; to see that scenario:
python -m tests.scenarios MODEL SEED
"""

from collections import Counter

import pytest

from tests.checksum_reference import continuation
from tests.scenarios import MOST_NEW, TRANSFORMERS, Scenario, subject
from tests.threads import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SHORT = {"checksum": 100} | dict.fromkeys(TRANSFORMERS, 10)
NUM_LONG = {"checksum": 1000} | dict.fromkeys(TRANSFORMERS, 100)
SHORT = [(name, seed) for name, count in NUM_SHORT.items() for seed in range(count)]
LONG = [(name, seed) for name, count in NUM_LONG.items() for seed in range(NUM_SHORT[name], count)]


@pytest.mark.parametrize(("name", "seed"), SHORT + [pytest.param(*case, marks=pytest.mark.soak) for case in LONG])
def test_every_request_returns_the_tokens_of_its_solo_run(name, seed):
    Scenario(name, seed).play()


def test_the_scenarios_reach_what_they_are_about():
    seen: Counter[str] = Counter()
    for seed in range(30):
        seen += Scenario("checksum", seed).play()
    rare = {"preemptions", "cached", "aborted", "stopped", "resumed", "sampled", "swapped", "controlled", "choices", "scored"}
    assert all(seen[what] >= 10 for what in rare) and seen["drained"] > 0, seen


def test_solo_runs_of_the_checksum_model_are_its_plain_arithmetic():
    checksum = subject("checksum")
    assert all(checksum.solo(i, 0) == continuation(prompt, MOST_NEW) for i, prompt in enumerate(checksum.prompts))
    assert checksum.solo(0, 1) != checksum.solo(0, 2) != checksum.solo(0, 0), "seeds that change nothing prove nothing"
