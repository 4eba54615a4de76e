"""Time to the first token and per token, from the requests' metrics."""

import argparse
import time

import numpy as np
from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="facebook/opt-125m")
parser.add_argument("--input-len", type=int, default=32)
parser.add_argument("--output-len", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-iters-warmup", type=int, default=1)
args = parser.parse_args()

llm = LLM(
    model=args.model,
    max_model_len=args.input_len + args.output_len + 1,
    enforce_eager=False,
    disable_log_stats=False,
    max_seq_len_to_capture=8192,
)
sampling_params = SamplingParams(n=1, temperature=0.0, ignore_eos=True, max_tokens=args.output_len, detokenize=False)
dummy_prompt_token_ids = np.random.randint(100, size=(args.batch_size, args.input_len))
dummy_prompts = [{"prompt_token_ids": batch} for batch in dummy_prompt_token_ids.tolist()]

for _ in range(args.num_iters_warmup):
    llm.generate(dummy_prompts, sampling_params=sampling_params, use_tqdm=False)
start = time.perf_counter()
outputs = llm.generate(dummy_prompts, sampling_params=sampling_params, use_tqdm=False)
wall = time.perf_counter() - start

ttft, e2e = [], []
for output in outputs:
    metrics = output.metrics
    ttft.append(metrics.first_token_time - metrics.arrival_time)
    e2e.append(metrics.finished_time - metrics.arrival_time)
    assert output.outputs[0].finished() and output.lora_request is None
num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
print("tokens:", num_tokens)
print("in order:", all(0 < first <= end <= wall + 1 for first, end in zip(ttft, e2e, strict=True)))
print("has percentiles:", np.percentile(e2e, 50) <= np.percentile(e2e, 99))
