"""Keeps results of several calls by their request ids, which are unique within the engine's life."""

import argparse
import json

from vllm import LLM, RequestOutput, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiiuae/falcon-7b")
parser.add_argument("--out", required=True)
args = parser.parse_args()

llm = LLM(model=args.model, max_model_len=128)
params = SamplingParams(temperature=0, max_tokens=8, top_k=1)
results: dict[str, RequestOutput] = {}
for chunk in (["What is 1 + 1?", "What is 2 + 2?"], ["What is 3 + 3?"], ["What is 4 + 4?", "What is 5 + 5?"]):
    for output in llm.generate([f"Q: {question}\nA:" for question in chunk], params, use_tqdm=False):
        assert output.request_id not in results, "an id came twice"
        results[output.request_id] = output

ordered = [results[key] for key in sorted(results, key=int)]
with open(args.out, "w") as f:
    json.dump([output.outputs[0].text.strip() for output in ordered], f)
ids = [int(output.request_id) for output in ordered]
print("increasing:", ids == list(range(ids[0], ids[0] + 5)))
