"""Samples that can be made again one by one: every prompt has a clone of the parameters with a seed of its own."""

import argparse

from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="google/gemma-2-2b-it")
parser.add_argument("--num_samples", type=int, default=3)
args = parser.parse_args()

llm = LLM(model=args.model, max_model_len=256, seed=None)
base = SamplingParams(temperature=1.5, max_tokens=12)
base.top_p = 0.98
base.stop = ["\n"]

prompt = "Q: Sort the letters of yellow.\nA:"
params = []
for i in range(args.num_samples):
    p = base.clone()
    p.seed = 100 + i
    params.append(p)
together = [output.outputs[0].text for output in llm.generate([prompt] * len(params), params, use_tqdm=False)]
alone = [llm.generate(prompt, p, use_tqdm=False)[0].outputs[0].text for p in reversed(params)][::-1]
print("same:", together == alone)

base.temperature = 0
print("greedy:", llm.generate([prompt], base)[0].outputs[0].text)
print("seeds:", [p.seed for p in params], base.seed)
