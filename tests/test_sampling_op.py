"""Sampling: the noise, the filters and the distribution of what is drawn."""

import math

import pytest
import torch
from scipy.stats import chisquare

from kernels import reference_sampling as ops
from protocol.messages import NO_TOKEN

DRAWS = 20_000


def sample(logits_NV, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, sampled_vocab=None):
    """Tokens of rows of logits; every parameter is a number for all rows or a list."""
    N, V = logits_NV.shape

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(N).clone()

    out_N = torch.full((N,), -7, dtype=torch.int32)
    ops.sample(
        logits_NV, column(temperature, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32),
        column(min_p, torch.float32), column(seed, torch.int64), column(position, torch.int32), sampled_vocab or V, out_N,
    )  # fmt: skip
    return out_N.tolist()


def exact_distribution(logits, temperature, top_k, top_p, min_p):
    """The probabilities by the definition, in Python's floats."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    weights = {v: math.exp((logits[v] - logits[order[0]]) / temperature) for v in order}
    kept = order[: top_k or len(order)]
    total, before, nucleus = sum(weights[v] for v in kept), 0.0, []
    for v in kept:
        if before < top_p * total or not nucleus:
            nucleus.append(v)
        before += weights[v]
    survivors = [v for v in nucleus if weights[v] >= min_p * weights[nucleus[0]]]
    total = sum(weights[v] for v in survivors)
    return {v: weights[v] / total for v in survivors}


CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.85, "min_p": 0.08},
}


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name, vary):
    parameters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | CASES[name]
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens = sample(logits_V.expand(DRAWS, -1), **parameters, **{vary: torch.arange(DRAWS) + 10**6})
    expected = exact_distribution([float(x) for x in logits_V], **parameters)
    assert set(tokens) <= set(expected)
    observed = [tokens.count(v) for v in expected]
    assert chisquare(observed, [DRAWS * p for p in expected.values()]).pvalue > 1e-4


@pytest.mark.parametrize("counter, key, words", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
])  # fmt: skip
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    got = ops.philox(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
    assert tuple(got[0].tolist()) == words


def test_noise_is_addressed_by_seed_position_and_id():
    """Word v % 4 of counter (v // 4, position, 0, 0) under the key (low, high) of the seed, also of a negative one."""
    seed, position, v = -3, 77, 4 * 5 + 2
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    words = ops.philox(tuple(torch.tensor([x]) for x in (v // 4, position, 0, 0)), (torch.tensor([low]), torch.tensor([high])))
    uniform = ((int(words[0, v % 4]) >> 9) + 0.5) * 2**-23
    noise = ops.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([v // 4]))
    assert float(noise[0, v % 4]) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6)


def test_the_highest_uniform_gives_the_highest_noise():
    highest = torch.tensor((2**23 - 1 + 0.5) * 2**-23)  # float32
    assert highest < 1 and -math.log(-math.log(float(highest))) < ops.HIGHEST_NOISE


def test_leaving_out_what_cannot_win_changes_nothing():
    """Against noise for the whole vocabulary, where logits lie on both sides of the span."""
    V, N = 203, 300
    logits_NV = torch.randn(N, V, generator=torch.Generator().manual_seed(2)) * 12
    noise = [ops.gumbel_noise(torch.tensor([n]).expand(51), torch.tensor([9]).expand(51), torch.arange(51)) for n in range(N)]
    expected = [int((logits_NV[n] + noise[n].flatten()[:V]).argmax()) for n in range(N)]
    assert sample(logits_NV, seed=torch.arange(N), position=9) == expected


def test_a_row_draws_the_same_token_in_every_batch():
    generator = torch.Generator().manual_seed(5)
    N, V = 24, 3000
    logits_NV = torch.randn(N, V, generator=generator) * 2
    rows = {
        "temperature": [0.0, 0.5, 1.0, 2.0] * 6,
        "top_k": [0, 1, 5, 40, 2000, 2999] * 4,
        "top_p": [1.0, 0.0, 0.5, 0.9, 0.999, 0.3, 0.97, 1.0] * 3,
        "min_p": [0.0, 0.05, 1.0] * 8,
        "seed": list(range(-12, 12)),
        "position": list(range(100, 124)),
    }
    together = sample(logits_NV, **rows)
    backwards = sample(logits_NV.flip(0), **{name: values[::-1] for name, values in rows.items()})[::-1]
    alone = [sample(logits_NV[n : n + 1], **{name: values[n] for name, values in rows.items()})[0] for n in range(N)]
    assert together == backwards == alone


@pytest.mark.parametrize("one", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_what_keeps_one_token_gives_the_lowest_id_of_the_highest(one):
    logits_NV = torch.zeros(40, 9)
    logits_NV[:, [3, 5]] = 2.0
    assert sample(logits_NV, seed=torch.arange(40), **one) == [3] * 40


def test_top_k_keeps_exactly_k_of_equal_logits():
    tokens = sample(torch.zeros(2000, 31), top_k=4, seed=torch.arange(2000))
    assert set(tokens) == {0, 1, 2, 3}


@pytest.mark.parametrize("vocab, top_p, kept", [(10, 0.35, 4), (4, 0.5, 2), (4, 0.51, 3)])
def test_top_p_keeps_the_fewest_that_reach_it(vocab, top_p, kept):
    tokens = sample(torch.zeros(2000, vocab), top_p=top_p, seed=torch.arange(2000))
    assert set(tokens) == set(range(kept))


@pytest.mark.parametrize("top_k", [10, 4096, 10**9, -1])
def test_a_top_k_of_the_vocabulary_or_more_is_no_limit(top_k):
    logits_NV = torch.randn(500, 10, generator=torch.Generator().manual_seed(1))
    assert sample(logits_NV, top_k=top_k, seed=torch.arange(500)) == sample(logits_NV, seed=torch.arange(500))


def test_min_p_of_one_keeps_the_highest():
    logits_NV = torch.randn(50, 60, generator=torch.Generator().manual_seed(1))
    assert sample(logits_NV, min_p=1.0, seed=torch.arange(50)) == logits_NV.argmax(-1).tolist()


@pytest.mark.parametrize("parameters", [
    {"top_k": 1500}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 1500, "top_p": 0.999}, {"top_k": 100, "top_p": 0.9},
])  # fmt: skip
def test_filters_on_a_vocabulary_longer_than_the_short_list(parameters):
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(8)) * 0.2
    assert len(logits_V) > max(ops.SHORT_LISTS)
    allowed = exact_distribution([float(x) for x in logits_V], 1.0, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters)
    top_k, top_p = torch.tensor([parameters.get("top_k", 0)]), torch.tensor([parameters.get("top_p", 1.0)])
    kept = ops._apply_filters(ops._scale(logits_V[None], torch.ones(1)), len(logits_V), top_k, top_p, torch.zeros(1))
    got = set(kept[0].isfinite().nonzero()[:, 0].tolist())
    assert len(got ^ set(allowed)) <= 1, "float32 may round the boundary's mass to the other side"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_sampled_vocabulary_are_never_chosen(temperature):
    logits_NV = torch.zeros(300, 12)
    logits_NV[:, 10:] = 50.0
    assert max(sample(logits_NV, temperature, sampled_vocab=10, seed=torch.arange(300))) < 10


@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_rows_without_a_finite_maximum_give_no_token(parameters):
    logits_NV = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    logits_NV[0] = torch.nan
    logits_NV[1] = -torch.inf
    logits_NV[2, 5] = torch.nan
    logits_NV[4, :7] = -torch.inf
    tokens = sample(logits_NV, **parameters)
    assert tokens[:3] == [ops.NO_TOKEN] * 3 and tokens[3] in range(8) and tokens[4] == 7
    assert ops.NO_TOKEN == NO_TOKEN
