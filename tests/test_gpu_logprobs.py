"""Log-probabilities on a GPU: the CPU's, beside graphs, and without waiting."""

import pytest
import torch

from protocol.logprobs import NUM_WORDS, read_score
from tests.checkpoints import tiny_checkpoint
from tests.simulation import Simulation
from tests.test_logprobs import NEW, PROMPTS, split
from worker.loading import load_model
from worker.logprobs import AT_ONCE, write_scores

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("overrides", [{"op_by_op": True}, {}], ids=["op by op", "graphs"])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 9, "max_pipeline_depth": 4, "max_step_tokens": 7, "num_host_blocks": 50}])
def test_scores_are_the_cpus(overrides, limits, tmp_path):
    folder, found = str(tiny_checkpoint(tmp_path, "qwen3", head_dim=32)), []
    for device in ("cpu", "cuda"):
        model = load_model(folder, "float32", device, 64)
        sim = Simulation(model, overrides if device == "cuda" else {}, **{"num_rows": 8, "block_size": 16, "num_blocks": 60, **limits})
        for handle, prompt in enumerate(PROMPTS):
            sim.add(handle, prompt, NEW, is_scored=handle % 3 != 1, is_prompt_scored=handle % 3 == 0)
        sim.run()
        pairs = [(token, score) for h in sorted(sim.scores) for token, score in zip(sim.outputs[h], sim.scores[h], strict=True)]
        pairs += [pair for h in sorted(sim.prompt_scores) for pair in zip(PROMPTS[h][1:], split(sim.prompt_scores[h]), strict=True)]
        found.append((sim.outputs, [read_score(token, score, 5) for token, score in pairs]))
    (cpu_outputs, cpu_scores), (gpu_outputs, gpu_scores) = found
    assert cpu_outputs == gpu_outputs and len(cpu_scores) > 100
    for one, other in zip(cpu_scores, gpu_scores, strict=True):
        assert (one.token_id, one.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def test_nothing_waits_for_the_device():
    logits_XV = torch.randn(2 * AT_ONCE + 3, 50_000, device="cuda")
    tokens_X = torch.randint(50_000, (len(logits_XV),), device="cuda").int()
    scores_XW = torch.zeros(len(logits_XV), NUM_WORDS, dtype=torch.int32, device="cuda")
    for mode in ("default", "error"):  # once to load what may be loaded only then
        torch.cuda.set_sync_debug_mode(mode)
        try:
            write_scores(logits_XV, tokens_X, scores_XW)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    got = [read_score(token, words.numpy().tobytes(), 1) for token, words in zip(tokens_X.tolist(), scores_XW.cpu())]
    expected_XV = logits_XV.double().log_softmax(dim=1).cpu()
    assert [score.logprob for score in got] == pytest.approx([row[s.token_id].item() for row, s in zip(expected_XV, got)], abs=1e-4)
