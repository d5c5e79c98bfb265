"""Sampling controls on a GPU: the CPU's tokens, in steps that no host waits for."""

import random

import pytest
import torch

from tests.checkpoints import tiny_checkpoint
from tests.simulation import Simulation
from tests.test_controls import add, joined, random_request, requests_and_outputs
from worker.controls import Controls
from worker.loading import load_model
from worker.staging import HostStaging, PinnedStaging

pytestmark = pytest.mark.gpu


def test_nothing_waits_for_the_device_and_the_logits_are_the_cpus():
    rng, vocab, num_rows = random.Random(5), 151_936, 70
    requests = [random_request(rng, vocab) for _ in range(num_rows)]
    joins = [joined(asked, row, output) for row, (asked, output) in enumerate(requests)]
    logits_NV = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    rows_N = torch.arange(num_rows).int()
    positions_N = torch.tensor([len(asked.prompt) + len(output) for asked, output in requests]).int()
    tokens_N = torch.randint(vocab, (num_rows,), generator=torch.Generator().manual_seed(1)).int()
    results = []
    for device, staging in (("cpu", HostStaging()), ("cuda", PinnedStaging(torch.device("cuda"), 1, 1000))):
        state = Controls(num_rows, vocab, torch.device(device))
        step = [tensor.to(device) for tensor in (logits_NV, rows_N, rows_N, positions_N, tokens_N)]
        for mode in ("default", "error"):  # once to load what may be loaded only then
            logits = step[0].clone()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                state.join(joins, staging)
                state.count(step[1], step[2], step[4])
                state.apply(logits, *step[1:4])
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append(logits.cpu())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overrides", [{"op_by_op": True}, {"enforce_eager": True}, {}], ids=["op by op", "eager", "graphs"])
@pytest.mark.parametrize("limits", [
    {"max_pipeline_depth": 4}, {"max_pipeline_depth": 2, "max_step_tokens": 16}, {"num_rows": 1},
    {"num_blocks": 17, "max_pipeline_depth": 4},
])  # fmt: skip
def test_requests_with_controls_give_the_slow_tokens(overrides, limits, tmp_path):
    model = load_model(str(tiny_checkpoint(tmp_path, "llama")), "float32", "cuda", 128)
    sim = Simulation(model, overrides, **{"num_rows": 16, "block_size": 8, **limits})
    requests, outputs = requests_and_outputs()
    for handle, asked in enumerate(requests):
        add(sim, handle, asked)
    sim.run()
    assert [sim.outputs[handle] for handle in range(len(requests))] == outputs
