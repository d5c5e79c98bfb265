"""The choice of kernels: by steps that a cost table stands for, so that it needs no GPU."""

import msgspec
import pytest
import torch

from kernels.matvec import MatvecConfig
from tests.checkpoints import tiny_checkpoint
from worker.loading import load_model
from worker.tuning import Choices, MeasuredChoices, parts_of, plan_buckets, tuned_size


class CostedChoices(MeasuredChoices):
    """A step costs what its kernels' numbers say; gate-up's best choice depends on the attention's."""

    def _step_ms(self, bucket, plan):
        self.num_timed = getattr(self, "num_timed", 0) + 1
        attention, qkv, out, gate_up, down, head = (part.options for part in self._parts(bucket))
        numbers = [options.index(plan.configs[name]) for name, options in zip(plan.configs, (qkv, out, gate_up, down))]
        depends = abs(numbers[2] - attention.index(plan.attention))
        return 10.0 + abs(numbers[0] - 2) + numbers[1] + depends + abs(numbers[3] - 1) + 2 * abs(attention.index(plan.attention) - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", head_dim=32, hidden_size=256, intermediate_size=256)
    return load_model(str(folder), "float32", "cpu", 128)


def test_a_kernel_after_the_other_is_changed_until_the_step_is_shortest(model):
    choices = CostedChoices(model, 2, model.vocab_size, cache_dir=None)
    plan = choices.choose(2)
    attention, qkv, out, gate_up, down, head = parts_of(model.config, model.dtype, 2, model.vocab_size, model.max_model_len)
    assert plan.attention == attention.options[1] and plan.head == head.options[0]
    best = {"qkv": qkv.options[2], "out": out.options[0], "gate_up": gate_up.options[1], "down": down.options[1]}
    assert plan.configs == best


def test_what_was_measured_once_is_not_measured_again(model, tmp_path):
    first = CostedChoices(model, 4, model.vocab_size, cache_dir=None)
    first.file = tmp_path / "cache" / "choices.json"
    plans = [first.choose(size) for size in (4, 1)]
    first.save()
    again = CostedChoices(model, 4, model.vocab_size, cache_dir=None)
    again.known = msgspec.json.decode(first.file.read_bytes())
    assert [again.choose(size) for size in (4, 1)] == plans and not hasattr(again, "num_timed")


def test_a_remembered_number_that_no_longer_exists_is_not_used(model):
    choices = Choices(model, model.vocab_size)
    choices.known = {part.key: 999 for part in choices._parts(1)}
    assert choices.choose(1) == Choices(model, model.vocab_size).choose(1)


def test_untuned_buckets_take_the_first_candidates_of_the_power_of_two_above_them(model):
    plans = plan_buckets(model, [1, 2, 24], model.vocab_size, None, tune=False)
    assert isinstance(plans[1].configs["qkv"], MatvecConfig) and tuned_size(24) == 32
    parts = parts_of(model.config, torch.float32, 32, model.vocab_size, model.max_model_len)
    assert plans[24].projections.qkv.rows == 24 and plans[24].configs["qkv"] == parts[1].options[0]
