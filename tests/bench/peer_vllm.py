"""vLLM on the work of `decode.py`: its milliseconds a decode step on random weights, one JSON line for each batch size.

usage: python tests/bench/peer_vllm.py MODEL_FOLDER [--batches 1,16,64,256] [--mode in-process|default]
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

PROMPT_TOKENS, NEW_TOKENS = 128, 257
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--mode", choices=["in-process", "default"], default="default", help="where vLLM's engine runs")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0" if arguments.mode == "in-process" else "1")

    from vllm import LLM, SamplingParams  # reads the settings

    llm = LLM(
        str(arguments.model), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=256, gpu_memory_utilization=0.85,
        max_model_len=8192, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    vocab = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def seconds(batch: int, new: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(1000, vocab - 1000) for _ in range(PROMPT_TOKENS)]} for _ in range(batch)]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return elapsed

    seconds(8, 16)
    for batch in map(int, arguments.batches.split(",")):
        short = statistics.median(seconds(batch, 1) for _ in range(arguments.repeats))
        long = statistics.median(seconds(batch, NEW_TOKENS) for _ in range(arguments.repeats))
        step_ms = (long - short) / (NEW_TOKENS - 1) * 1e3
        print(json.dumps({"peer": "vllm", "mode": arguments.mode, "batch": batch, "step_ms": round(step_ms, 4)}), flush=True)


if __name__ == "__main__":
    main()
