"""What a client may ask of sampling: every bound is kept, with field, value and limit in the refusal."""

from math import inf, nan

import pytest

from protocol.sampling import BOUNDS, SamplingParams, check_sampling, row_sampling

VOCAB = 1000
INTEGERS = {"max_tokens", "top_k", "seed"}


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"])
def test_both_limits_are_allowed_and_what_lies_beyond_is_refused(field):
    low, high = BOUNDS[field]
    for value in (low, high):
        check_sampling(SamplingParams(**{field: value}), VOCAB)
    beyond = [low - 1, high + 1] if field in INTEGERS else [low - 1e-7, high * (1 + 1e-7), inf, -inf, nan]
    for value in beyond:
        with pytest.raises(ValueError, match=f"{field} must be between .*, got"):
            check_sampling(SamplingParams(**{field: value}), VOCAB)


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 3, 10**9])
def test_stop_token_ids_are_checked_against_the_models_vocabulary(token):
    with pytest.raises(ValueError, match=f"stop_token_ids must hold ids between 0 and 999, got {token}"):
        check_sampling(SamplingParams(stop_token_ids=[5, token]), VOCAB)
    check_sampling(SamplingParams(stop_token_ids=[0, VOCAB - 1]), VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature):
    assert row_sampling(SamplingParams(temperature=temperature), random_seed=0).temperature == 0.0


@pytest.mark.parametrize(("temperature", "used"), [(1e-5, 1e-5), (1e-4, 1e-4), (None, 1.0)])
def test_other_temperatures_are_used_as_they_are(temperature, used):
    assert row_sampling(SamplingParams(temperature=temperature), random_seed=0).temperature == used


def test_a_value_given_always_wins_over_the_default():
    assert row_sampling(SamplingParams(seed=0), random_seed=9).seed == 0
    assert row_sampling(SamplingParams(), random_seed=9).seed == 9
    assert row_sampling(SamplingParams(top_p=0.0), random_seed=0).top_p == 0.0
    assert [row_sampling(SamplingParams(top_k=k), random_seed=0).top_k for k in (None, -1, 0, 7)] == [0, 0, 0, 7]
