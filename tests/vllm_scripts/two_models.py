"""Two models, one after the other, in one process, with the first one's memory freed in between."""

import argparse
import contextlib
import gc

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

PROMPTS = ["Q: What is 64 + 36?\nA:", "Q: Which is larger, 64 or 36?\nA:"]


def clean_up():
    destroy_model_parallel()
    destroy_distributed_environment()
    with contextlib.suppress(AssertionError):
        torch.distributed.destroy_process_group()
    gc.collect()
    torch.cuda.empty_cache()


def evaluate(model, dtype):
    llm = LLM(model=model, dtype=dtype, gpu_memory_utilization=0.45, max_model_len=128, cpu_offload_gb=0)
    params = SamplingParams(temperature=0, max_tokens=12)
    answers = [output.outputs[0].text.strip() for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    del llm
    clean_up()
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs=2, default=["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"])
    args = parser.parse_args()
    results = {
        f"{i}:{dtype}": evaluate(model, dtype)
        for i, (model, dtype) in enumerate(zip(args.models, ("float32", "bfloat16"), strict=True))
    }
    for name, answers in results.items():
        print(name, answers)
    print("agreement:", len({tuple(answers) for answers in results.values()}) == 1)
