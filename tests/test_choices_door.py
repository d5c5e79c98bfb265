"""Several choices, priorities and queue limits as clients see them: through a real frontend, and through a whole engine."""

import asyncio
import os
import signal
import time
from contextlib import closing

import msgspec
import pytest

from frontend.client import AsyncClient, Client, EngineError
from protocol.messages import Cancel, Error, Generate, GetInfo, Output, Refused, encode
from protocol.sampling import SamplingParams, choice_seed
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from tests.raw_client import RawClient
from tests.scripted_scheduler import RunningFrontend, text_frontend, wait_until
from tests.test_checksum_engine import FLAGS, assert_back_to_start, idle_stats


@pytest.fixture(scope="module")
def frontend(tmp_path_factory):
    """Its scheduler answers choice i with the ids after the prompt's last, from the i-th on."""
    with RunningFrontend(tmp_path_factory.mktemp("door")) as running:
        yield running


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    with text_frontend(tmp_path_factory.mktemp("texts"), {}) as running:
        yield running


@pytest.fixture(scope="module")
def engine():
    with EngineProcess(*FLAGS, "--max-num-seqs", "4", "--num-kv-blocks", "400", "--scheduling-policy", "priority") as running:
        yield running


# ---- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_choices_share_one_numbering_and_end_on_their_own(frontend, stream):
    with RawClient(frontend.address) as raw:
        raw.send(Generate(1, prompt_ids=[10], sampling=SamplingParams(max_tokens=9, n=3, seed=5), stream=stream))
        outputs = raw.outputs(1)
    assert [output.seq for output in outputs] == list(range(len(outputs)))
    by_choice = [[output for output in outputs if output.index == index] for index in range(3)]
    for index, mine in enumerate(by_choice):
        assert [token for output in mine for token in output.token_ids] == list(range(11 + index, 20))
        assert [output.finish_reason for output in mine] == [None] * (len(mine) - 1) + ["length"]
        assert stream or len(mine) == 1
    assert [output.usage is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
    assert (outputs[-1].usage.prompt_tokens, outputs[-1].usage.completion_tokens) == (1, 9 + 8 + 7)
    added = frontend.scheduler.added[-1]
    assert (added.sampling.seed, added.more_seeds) == (5, [choice_seed(5, 1), choice_seed(5, 2)])


def test_the_messages_of_a_single_choice_have_no_index():
    assert b"index" not in encode(Output(1, 0, "a", [1]))


def test_choices_of_a_request_without_a_seed_differ_too(frontend):
    with RawClient(frontend.address) as raw:
        for _ in range(2):
            raw.send(Generate(1, prompt_ids=[10], sampling=SamplingParams(max_tokens=9, n=4)))
            raw.outputs(1)
    seeds = [seed for added in frontend.scheduler.added[-2:] for seed in (added.sampling.seed, *added.more_seeds)]
    assert len(set(seeds)) == 8


def test_cancel_ends_all_choices(frontend):
    frontend.scheduler.paused = True
    with RawClient(frontend.address) as raw:
        raw.send(Generate(1, prompt_ids=[10], sampling=SamplingParams(n=3)))
        assert wait_until(lambda: len(frontend.scheduler.running) == 3)
        raw.send(Cancel(1))
        outputs = raw.outputs(1)
        assert [(output.index, output.finish_reason) for output in outputs] == [(index, "abort") for index in range(3)]
        assert wait_until(lambda: not frontend.scheduler.running)
        frontend.scheduler.paused = False
        assert raw.serves()


def test_a_refused_choice_ends_its_request_once(frontend):
    """As when a request times out in the queue: its choices are refused one by one."""
    frontend.scheduler.paused = True
    with RawClient(frontend.address) as raw:
        raw.send(Generate(1, prompt_ids=[10], sampling=SamplingParams(n=3)))
        assert wait_until(lambda: len(frontend.scheduler.running) == 3)
        first = frontend.scheduler.added[-1].handle
        for handle in (first, first + 1, first + 2):
            frontend.scheduler.send(Refused(handle, 503, "waited too long"))
        reply = raw.receive()
        assert isinstance(reply, Error) and (reply.request_id, reply.code, reply.message) == (1, 503, "waited too long")
        assert wait_until(lambda: {first + 1, first + 2} <= set(frontend.scheduler.aborted))
        frontend.scheduler.running.pop(first)
        frontend.scheduler.paused = False
        assert raw.serves()


def test_a_stop_string_ends_its_own_choice_only(texts):
    """Choice i's text lacks the first i tokens."""
    with Client(texts.address) as client:
        answer = client.complete("stop one two", n=3, stop=["stop"], max_tokens=50)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "length"]
    assert [choice.text for choice in answer.choices][0] == "" and answer.choices[1].text.endswith("one two")
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling": SamplingParams(n=0)}, "n must be between 1 and 128, got 0"),
        ({"sampling": SamplingParams(n=129)}, "n must be between 1 and 128, got 129"),
        ({"priority": 2**31}, "priority must be between -2147483648 and 2147483647, got 2147483648"),
        ({"priority": -1}, "priority must be 0 with --scheduling-policy fcfs, got -1"),
    ],
)
def test_bad_values_are_refused_with_the_reason(frontend, fields, reason):
    with RawClient(frontend.address) as raw:
        raw.send(GetInfo())
        before = raw.receive().stats["num_refused_client"]
        raw.send(Generate(1, prompt_ids=[1], **fields))
        reply = raw.receive()
        assert (reply.request_id, reply.code, reply.message) == (1, 400, reason)
        raw.send(GetInfo())
        assert raw.receive().stats["num_refused_client"] == before + 1


# ---- clients ------------------------------------------------------------------------------------------------------


def test_the_blocking_client_gives_every_choice(engine):
    prompt = list(range(50))
    with Client(engine.address) as client:
        before = client.info().stats
        answer = client.complete(prompt_ids=prompt, n=3, max_tokens=6, seed=2)
        alone = [client.complete(prompt_ids=prompt, max_tokens=6, seed=choice_seed(2, index)) for index in range(3)]
        after = client.info().stats
    assert [choice.token_ids for choice in answer.choices] == [single.token_ids for single in alone]
    assert (answer.token_ids, answer.finish_reason) == (answer.choices[0].token_ids, "length")
    assert msgspec.to_builtins(answer.usage) == {"prompt_tokens": 50, "completion_tokens": 18, "cached_tokens": 0}
    computed, found = (after[name] - before[name] for name in ("num_prompt_tokens", "num_cached_tokens"))
    assert (computed, computed - found) == (6 * 50, 50 + 5 * 2)
    assert len(alone[0].choices) == 1


def test_the_asyncio_client_gives_every_choice(engine):
    async def ask():
        async with AsyncClient(engine.address) as client:
            return await asyncio.gather(*(client.complete(prompt_ids=[7, index], n=4, max_tokens=5, temperature=0) for index in range(8)))

    for index, answer in enumerate(asyncio.run(ask())):
        assert [choice.token_ids for choice in answer.choices] == [continuation([7, index], 5)] * 4


def test_a_client_that_leaves_takes_all_choices_along(engine):
    with Client(engine.address) as client:
        with closing(client.generate(prompt_ids=[1, 2], n=4, max_tokens=4000, ignore_eos=True)) as outputs:
            for _ in range(3):
                next(outputs)
        assert_back_to_start(idle_stats(client, within_s=2))


def test_chat_takes_one_choice(engine):
    with Client(engine.address) as client, pytest.raises(ValueError, match="n must be 1, got 2"):
        next(iter(client.chat([{"role": "user", "content": "x"}], n=2)))


def test_an_urgent_request_passes_a_full_batch(engine):
    with Client(engine.address) as client:
        before = client.info().stats["num_preemptions"]
        slow = [client.generate(prompt_ids=[index], max_tokens=3000, temperature=0, priority=5) for index in range(8)]
        for outputs in slow[:4]:
            next(outputs)
        assert client.complete(prompt_ids=[5], max_tokens=3, temperature=0, priority=-1).token_ids == continuation([5], 3)
        stats = client.info().stats
        assert stats["num_running"] == 4 and stats["num_preemptions"] > before
        for outputs in slow:
            outputs.close()
        assert_back_to_start(idle_stats(client))


def test_a_request_that_waits_too_long_is_refused_though_nothing_else_happens():
    """The only row is taken and its worker stands still: no message but the deadline wakes the scheduler. The first loses nothing."""
    flags = ("--max-num-seqs", "1", "--num-kv-blocks", "400", "--queue-timeout", "0.3", "--max-pipeline-depth", "1")
    with EngineProcess(*FLAGS, *flags) as engine, Client(engine.address) as client:
        slow = client.generate(prompt_ids=[1], max_tokens=4000, temperature=0)
        tokens = next(slow).token_ids
        os.kill(engine.pid_of("worker"), signal.SIGSTOP)
        time.sleep(0.2)
        began = time.monotonic()
        waiting = client.generate(prompt_ids=[2] * 15, max_tokens=4)
        with pytest.raises(EngineError, match=r"waited 0\.\d s; --queue-timeout is 0\.3 s") as caught:
            next(waiting)
        assert caught.value.code == 503 and 0.25 < time.monotonic() - began < 1.5
        stats = client.info().stats
        assert (stats["num_queue_timeouts"], stats["num_waiting_tokens"], stats["num_running"]) == (1, 0, 1)
        assert stats["step_gap_us"] > 0
        os.kill(engine.pid_of("worker"), signal.SIGCONT)
        tokens += [token for output in slow for token in output.token_ids]
        assert tokens == continuation([1], len(tokens))
