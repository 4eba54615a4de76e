"""A long prefix that all prompts share, with and without prefix caching."""

import argparse
import time

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = "You answer with one word or number. " * 12 + "\n\n"
prompts = [f"{prefix}Q: What is {a} + {b}?\nA:" for a, b in ((40, 2), (50, 5), (61, 7))]


def run(model, enable_prefix_caching):
    llm = LLM(
        model=model,
        gpu_memory_utilization=0.4,
        enable_prefix_caching=enable_prefix_caching,
        block_size=16,
        max_num_batched_tokens=2048,
        prefix_caching_hash_algo="sha256",
    )
    params = SamplingParams(temperature=0.0, max_tokens=8)
    llm.generate(prompts[0], params, use_tqdm=False)  # warm-up
    start = time.time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    cached = [output.num_cached_tokens > 400 for output in outputs]
    print(f"caching={enable_prefix_caching} cached={cached} fast={time.time() - start < 60}")
    texts = [output.outputs[0].text for output in outputs]
    del llm
    cleanup_dist_env_and_memory()
    return texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="facebook/opt-125m")
    args = parser.parse_args()
    print("Generated texts are the same:", run(args.model, False) == run(args.model, True))
