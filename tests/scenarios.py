"""Random scenarios around a small model: an engine of random limits, random requests, and moments at which to abort them.

A scenario follows from its seed alone. To see one: python -m tests.scenarios MODEL SEED
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from protocol.messages import encode
from protocol.sampling import RowSampling
from scheduler.policy import blocks_for
from tests.checkpoints import tiny_checkpoint
from tests.simulation import GREEDY, Simulation
from worker.checksum import ChecksumModel
from worker.loading import load_model
from worker.runner import Model

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
TRANSFORMERS = {
    "llama": TINY | {"num_hidden_layers": 2},
    "qwen2": TINY | {"tie_word_embeddings": True},
    "qwen3": TINY | {"head_dim": 16},
}
# Low temperatures: the model's own choice wins mostly and not always, so that a wrong page and a wrong seed both show.
SAMPLINGS = [
    GREEDY,
    RowSampling(temperature=0.12, seed=7),
    RowSampling(temperature=0.12, seed=8),
    RowSampling(temperature=0.3, top_k=20, seed=-1),
    RowSampling(temperature=0.5, top_p=0.9, min_p=0.02, seed=2**62),
]
CONTEXT = 64  # tokens of the longest one
MOST_NEW = 24

Draw = Callable[[random.Random], object]

# What a scenario varies. Each dimension draws from a generator of its own, so that a new one leaves what a seed stood for as it was.
LIMITS: dict[str, Draw] = {
    "max_pipeline_depth": lambda rng: rng.randint(1, 4),
    "num_rows": lambda rng: rng.choice([1, 3, 8, 20]),
    "block_size": lambda rng: rng.choice([1, 2, 4, 8, 16]),
    "max_step_tokens": lambda rng: rng.choice([1, 4, 16, 64, 512]),
    "max_model_len": lambda rng: rng.choice([24, 40, CONTEXT]),
    "enable_prefix_caching": lambda rng: rng.random() < 0.8,
    "num_host_blocks": lambda rng: rng.choice([0, 5, 1000]),
    "preemption_mode": lambda rng: rng.choice(["swap", "swap", "auto"]),
}
ENGINE: dict[str, Draw] = {
    "contexts": lambda rng: rng.choice([1.0, 1.3, 1.6, 3.0, 10.0]),  # of the longest length, that the pool holds
    "num_requests": lambda rng: rng.choice([3, 8, 16]),
    "haste": lambda rng: rng.choice([0.0, 0.0, 0.4, 0.8]),  # steps between arrivals: how likely one more is
    "abort_share": lambda rng: rng.choice([0.0, 0.0, 0.2, 0.5]),
    "has_wild_depth": lambda rng: rng.random() < 0.5,  # the depth in use changes with every step, as measurements make it do
}
REQUEST: dict[str, Draw] = {
    "prompt": lambda rng: rng.randrange(NUM_PROMPTS),
    "max_tokens": lambda rng: rng.choice([rng.randint(1, 3), rng.randint(4, MOST_NEW), MOST_NEW]),
    "num_end_ids": lambda rng: rng.choice([0, 0, 0, 12]),
    "sampling": lambda rng: rng.choice([0, rng.randrange(len(SAMPLINGS))]),
    "salt": lambda rng: rng.choice([b"", b"", b"other"]),
    "num_resumed": lambda rng: rng.choice([0, 0, 0, 0, 2]),  # tokens that came before, as when a frontend resubmits
    "abort_after": lambda rng: rng.choice([0, rng.randint(1, 10), rng.randint(1, 60)]),  # steps, where it is aborted
}
NUM_STEMS, NUM_PROMPTS = 3, 24


def draw(dimensions: dict[str, Draw], seed: str) -> dict[str, object]:
    """A value for each dimension."""
    return {name: choose(random.Random(f"{seed} {name}")) for name, choose in dimensions.items()}


class Subject:
    """A model to put into scenarios, with a catalogue of prompts and what it makes of each alone.

    The catalogue is the same in all scenarios: each solo run is made once, and rounding that would let two candidates change places
    shows on the first day or never.
    """

    def __init__(self, load: Callable[[], Model]):
        self.model, self._solo_model = load(), load()
        rng = random.Random(0)
        self.vocab_size = self.model.vocab_size
        stems = [[rng.randrange(self.vocab_size) for _ in range(CONTEXT)] for _ in range(NUM_STEMS)]
        self.prompts = [self._branch(rng, rng.choice(stems)) for _ in range(NUM_PROMPTS)]
        self.solo = cache(self._solo)

    def _branch(self, rng: random.Random, stem: list[int]) -> list[int]:
        tail = [rng.randrange(self.vocab_size) for _ in range(rng.choice([0, 1, 5]))]
        return stem[: rng.choice([1, 3, 8, 16, 17, 33])] + tail

    def _solo(self, prompt: int, sampling: int) -> list[int]:
        """The longest continuation of a prompt by itself, one step at a time, nothing cached."""
        alone = Simulation(
            self._solo_model, num_rows=1, max_pipeline_depth=1, max_step_tokens=512, block_size=16, num_blocks=8,
            max_model_len=CONTEXT + MOST_NEW, enable_prefix_caching=False,
        )  # fmt: skip
        alone.add(0, self.prompts[prompt], MOST_NEW, sampling=SAMPLINGS[sampling])
        alone.run()
        return alone.outputs[0]


@cache
def subject(name: str) -> Subject:
    """By name: "checksum" or one of TRANSFORMERS."""
    if name == "checksum":
        return Subject(lambda: ChecksumModel(CONTEXT + MOST_NEW))
    with tempfile.TemporaryDirectory() as folder:
        tiny_checkpoint(Path(folder), name, **TRANSFORMERS[name])
        return Subject(lambda: load_model(folder, "float32", "cpu", CONTEXT + MOST_NEW))


@dataclass(frozen=True)
class Case:
    """One request of a scenario."""

    prompt: list[int]
    max_tokens: int
    end_ids: list[int]
    sampling: RowSampling
    salt: bytes
    generated: list[int]
    abort_after: int | None
    expected: list[int]  # the tokens still to come


class Scenario:
    """An engine and its requests, to be played once."""

    def __init__(self, name: str, seed: int):
        self.subject, self.seed = subject(name), seed
        self.rng = random.Random(seed)
        self.limits, self.engine = draw(LIMITS, f"{seed}"), draw(ENGINE, f"{seed}")
        block_size, context = self.limits["block_size"], self.limits["max_model_len"]
        self.limits["num_blocks"] = int(blocks_for(context, block_size) * self.engine["contexts"])
        self.cases = [case for i in range(self.engine["num_requests"]) if (case := self._case(i)) is not None]
        self.aborted: dict[int, int] = {}  # handle -> tokens that had come by then

    def _case(self, i: int) -> Case | None:
        """The i-th request; None where its prompt leaves no room in the context."""
        drawn = draw(REQUEST, f"{self.seed} {i}")
        prompt, room = self.subject.prompts[drawn["prompt"]], self.limits["max_model_len"] - len(self.subject.prompts[drawn["prompt"]])
        if room < 1:
            return None
        whole = self.subject.solo(drawn["prompt"], drawn["sampling"])[: min(room, drawn["max_tokens"])]
        resumed = min(drawn["num_resumed"], len(whole) - 1)
        end_ids = self.rng.sample(range(self.subject.vocab_size), drawn["num_end_ids"])
        if drawn["num_end_ids"]:
            end_ids[0] = self.rng.choice(whole)  # one that comes
        ends = [j for j, token in enumerate(whole) if token in end_ids and j >= resumed]
        expected = whole[resumed : ends[0] + 1] if ends else whole[resumed:]
        abort_after = drawn["abort_after"] if self.rng.random() < self.engine["abort_share"] else None
        return Case(
            prompt, drawn["max_tokens"], end_ids, SAMPLINGS[drawn["sampling"]], drawn["salt"], whole[:resumed], abort_after, expected
        )

    def play(self) -> Counter[str]:
        """Run to the end, check everything; returns how often what happened."""
        self.sim = Simulation(self.subject.model, **self.limits)
        self.clock, self.aborts = 0, []
        for handle, case in enumerate(self.cases):
            refused = self.sim.add(
                handle, case.prompt, case.max_tokens, case.end_ids, sampling=case.sampling, generated=case.generated, salt=case.salt
            )
            assert refused is None, refused
            if case.abort_after is not None:
                self.aborts.append((self.clock + case.abort_after, handle))
            self._abort_due()
            while self.rng.random() < self.engine["haste"]:
                self._step()
        while self._step():
            pass
        self.sim.check_idle()
        self._check_outputs()
        self._check_cached()
        return self._counts()

    def _step(self) -> bool:
        """One step; requests are aborted before it, and with steps just sent."""
        self.clock += 1
        if self.engine["has_wild_depth"]:
            self.sim.scheduler.depth = self.rng.randint(1, self.limits["max_pipeline_depth"])
        self._abort_due()
        if self.sim.scheduler.has_room and self.rng.random() < 0.3 and (plan := self.sim.scheduler.plan()):
            self.sim.results.append(self.sim.worker.run(encode(plan.delta)))
            self.clock += 1
            self._abort_due()
        is_busy = self.sim.step()
        self.sim.scheduler.check()
        return is_busy

    def _abort_due(self) -> None:
        for moment, handle in [due for due in self.aborts if due[0] <= self.clock]:
            self.aborts.remove((moment, handle))
            if handle not in self.sim.finished:
                self.aborted[handle] = len(self.sim.outputs[handle])
            self.sim.abort(handle)
            self.sim.scheduler.check()

    def _check_outputs(self) -> None:
        for handle, case in enumerate(self.cases):
            output = self.sim.outputs[handle]
            if handle in self.aborted:
                assert output == case.expected[: self.aborted[handle]], f"request {handle}, aborted"
                assert handle not in self.sim.finished
            else:
                assert output == case.expected, f"request {handle}: {case}"
                assert self.sim.finished[handle] == ("stop" if output[-1] in case.end_ids else "length"), f"request {handle}"

    def _check_cached(self) -> None:
        """What a request found in the prefix cache began another one of the same salt."""
        wholes = [[*case.prompt, *case.generated, *case.expected] for case in self.cases]
        for handle, num_cached in self.sim.num_cached.items():
            if num_cached == 0:
                continue
            salt, prefix = self.cases[handle].salt, wholes[handle][:num_cached]
            others = [i for i, case in enumerate(self.cases) if i != handle and case.salt == salt]
            assert self.limits["enable_prefix_caching"]
            assert any(wholes[i][:num_cached] == prefix for i in others), f"request {handle}: {self.cases[handle]}"

    def _counts(self) -> Counter[str]:
        scheduler = self.sim.scheduler
        return Counter(
            requests=len(self.cases),
            tokens=scheduler.num_generated_tokens,
            preemptions=scheduler.num_preemptions,
            drained=self.sim.most_draining,
            swapped=scheduler.swap.num_in,
            cached=scheduler.num_cached_tokens,
            aborted=len(self.aborted),
            stopped=sum(reason == "stop" for reason in self.sim.finished.values()),
            resumed=sum(bool(case.generated) for case in self.cases),
            sampled=sum(case.sampling != GREEDY for case in self.cases),
        )


def main(name: str, seed: int) -> None:
    """Show a scenario, then play it."""
    scenario = Scenario(name, seed)
    print(scenario.limits, scenario.engine)
    for handle, case in enumerate(scenario.cases):
        print(handle, case)
    print(dict(scenario.play()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
