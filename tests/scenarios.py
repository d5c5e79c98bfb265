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

import msgspec
import numpy as np

from protocol.controls import RowControls
from protocol.messages import encode, pack
from protocol.sampling import RowSampling, choice_seed
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
    "qwen3_moe": TINY | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}
# Low temperatures: the model's own choice wins mostly and not always, so that a wrong page and a wrong seed both show.
SAMPLINGS = [
    GREEDY,
    RowSampling(temperature=0.12, seed=7),
    RowSampling(temperature=0.12, seed=8),
    RowSampling(temperature=0.3, top_k=20, seed=-1),
    RowSampling(temperature=0.5, top_p=0.9, min_p=0.02, seed=2**62),
]
# What changes logits: numbers for the sampling, and lists.
CONTROLS = [
    ({}, None),
    ({"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3}, RowControls(needs_tokens=True)),
    ({}, RowControls(bias_ids=pack([3, 50]), bias_values=np.float32([1.5, -2]).tobytes(), allowed_ids=pack(range(2, 90)))),
    ({"frequency_penalty": 0.8}, RowControls(bad_words=[pack([7]), pack([3, 4])], needs_tokens=True)),
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
    "controls": lambda rng: rng.choice([0, 0, rng.randrange(len(CONTROLS))]),
    "n": lambda rng: rng.choice([1, 1, 1, 1, 2, MOST_CHOICES]),
    "aborted_choice": lambda rng: rng.randrange(MOST_CHOICES),
    "priority": lambda rng: rng.choice([0, 0, 0, -1, 2]),
    "is_scored": lambda rng: rng.random() < 0.2,
    "is_stepwise": lambda rng: rng.random() < 0.15,
}
NUM_STEMS, NUM_PROMPTS = 3, 24
MOST_CHOICES = 4


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

    def _solo(self, prompt: int, sampling: int, controls: int = 0, choice: int = 0) -> list[int]:
        """The longest continuation of a prompt by itself, one step at a time, nothing cached, with the seed of a choice."""
        alone = Simulation(
            self._solo_model, num_rows=1, max_pipeline_depth=1, max_step_tokens=512, block_size=16, num_blocks=8,
            max_model_len=CONTEXT + MOST_NEW, enable_prefix_caching=False,
        )  # fmt: skip
        how = sampling_of(sampling, controls)
        how = msgspec.structs.replace(how, seed=choice_seed(how.seed, choice))
        alone.add(0, self.prompts[prompt], MOST_NEW, sampling=how, controls=CONTROLS[controls][1])
        alone.run()
        return alone.outputs[0]


def sampling_of(sampling: int, controls: int) -> RowSampling:
    """One of SAMPLINGS with the numbers of one of CONTROLS."""
    return msgspec.structs.replace(SAMPLINGS[sampling], **CONTROLS[controls][0])


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
    controls: RowControls | None
    salt: bytes
    priority: int
    is_scored: bool
    is_stepwise: bool
    generated: list[int]
    abort_after: int | None
    aborted_choice: int
    expected: list[list[int]]  # the tokens still to come, by choice


class Scenario:
    """An engine and its requests, to be played once."""

    def __init__(self, name: str, seed: int):
        self.subject, self.seed = subject(name), seed
        self.rng = random.Random(seed)
        self.limits, self.engine = draw(LIMITS, f"{seed}"), draw(ENGINE, f"{seed}")
        block_size, context = self.limits["block_size"], self.limits["max_model_len"]
        self.limits["num_blocks"] = int(blocks_for(context, block_size) * self.engine["contexts"])
        self.cases = [case for i in range(self.engine["num_requests"]) if (case := self._case(i)) is not None]
        self.by_handle = {MOST_CHOICES * i + choice: case for i, case in enumerate(self.cases) for choice in range(len(case.expected))}
        self.aborted: dict[int, int] = {}  # handle -> tokens that had come by then

    def _case(self, i: int) -> Case | None:
        """The i-th request; None where its prompt leaves no room in the context."""
        drawn = draw(REQUEST, f"{self.seed} {i}")
        prompt, room = self.subject.prompts[drawn["prompt"]], self.limits["max_model_len"] - len(self.subject.prompts[drawn["prompt"]])
        if room < 1:
            return None
        wholes = [self._whole(drawn, choice)[: min(room, drawn["max_tokens"])] for choice in range(drawn["n"])]
        resumed = min(drawn["num_resumed"], len(wholes[0]) - 1) if drawn["n"] == 1 else 0
        end_ids = self.rng.sample(range(self.subject.vocab_size), drawn["num_end_ids"])
        if drawn["num_end_ids"]:
            end_ids[0] = self.rng.choice(wholes[0])  # one that comes
        abort_after = drawn["abort_after"] if self.rng.random() < self.engine["abort_share"] else None
        return Case(
            prompt, drawn["max_tokens"], end_ids, sampling_of(drawn["sampling"], drawn["controls"]), CONTROLS[drawn["controls"]][1],
            drawn["salt"], drawn["priority"], drawn["is_scored"], drawn["is_stepwise"], wholes[0][:resumed], abort_after,
            drawn["aborted_choice"] % drawn["n"],
            [whole[resumed:][: _end(whole[resumed:], end_ids)] for whole in wholes],
        )  # fmt: skip

    def _whole(self, drawn: dict, choice: int) -> list[int]:
        return self.subject.solo(drawn["prompt"], drawn["sampling"], drawn["controls"], choice)

    def play(self) -> Counter[str]:
        """Run to the end, check everything; returns how often what happened."""
        self.sim = Simulation(self.subject.model, **self.limits)
        self.clock, self.aborts = 0, []
        for i, case in enumerate(self.cases):
            self._add(MOST_CHOICES * i, case)
            self._abort_due()
            while self.rng.random() < self.engine["haste"]:
                self._step()
        while self._step():
            pass
        self.sim.check_idle()
        self._check_outputs()
        self._check_cached()
        return self._counts()

    def _add(self, handle: int, case: Case) -> None:
        more_seeds = [choice_seed(case.sampling.seed, choice) for choice in range(1, len(case.expected))]
        refused = self.sim.add(
            handle, case.prompt, case.max_tokens, case.end_ids, case.sampling, case.generated, case.salt, priority=case.priority,
            more_seeds=more_seeds, controls=case.controls, is_scored=case.is_scored, is_stepwise=case.is_stepwise,
        )  # fmt: skip
        assert refused is None, refused
        if case.abort_after is not None:
            self.aborts.append((self.clock + case.abort_after, handle + case.aborted_choice))

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
        for handle, case in self.by_handle.items():
            output, expected = self.sim.outputs[handle], case.expected[handle % MOST_CHOICES]
            if handle in self.aborted:
                assert output == expected[: self.aborted[handle]], f"request {handle}, aborted"
                assert handle not in self.sim.finished
            else:
                assert output == expected, f"request {handle}: {case}"
                assert self.sim.finished[handle] == ("stop" if output[-1] in case.end_ids else "length"), f"request {handle}"
            assert len(self.sim.scores.get(handle, ())) == case.is_scored * len(output), f"request {handle}"

    def _check_cached(self) -> None:
        """What a request found in the prefix cache began another one of the same salt."""
        wholes = {h: [*case.prompt, *case.generated, *case.expected[h % MOST_CHOICES]] for h, case in self.by_handle.items()}
        for handle, num_cached in self.sim.num_cached.items():
            if num_cached == 0:
                continue
            salt, prefix = self.by_handle[handle].salt, wholes[handle][:num_cached]
            others = [other for other, case in self.by_handle.items() if other != handle and case.salt == salt]
            assert self.limits["enable_prefix_caching"]
            assert any(wholes[other][:num_cached] == prefix for other in others), f"request {handle}: {self.by_handle[handle]}"

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
            controlled=sum(case.controls is not None for case in self.cases),
            choices=len(self.by_handle) - len(self.cases),
            scored=len(self.sim.scores),
        )


def _end(tokens: list[int], end_ids: list[int]) -> int:
    """How many of the tokens come until one ends them."""
    return next((i + 1 for i, token in enumerate(tokens) if token in end_ids), len(tokens))


def main(name: str, seed: int) -> None:
    """Show a scenario, then play it."""
    scenario = Scenario(name, seed)
    print(scenario.limits, scenario.engine)
    for handle, case in enumerate(scenario.cases):
        print(handle, case)
    print(dict(scenario.play()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
