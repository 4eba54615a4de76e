"""Rejection sampling: only checked answers are kept, and unsolved problems are sampled again, warmer."""

import argparse
import json
import re

from vllm import LLM, SamplingParams

PROBLEMS = ["What is 47 + 385?", "What is 812 - 300?", "What is 7 + 8?", "What is 1000 + 1?"]


def is_correct(problem, text):
    a, sign, b = re.search(r"(\d+) ([+-]) (\d+)", problem).groups()
    gold = int(a) + int(b) if sign == "+" else int(a) - int(b)
    return text.strip() == str(gold)


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2.5-Math-7B")
parser.add_argument("--rounds", type=int, default=4)
parser.add_argument("--num-samples", type=int, default=4)
parser.add_argument("--save-to", default="accepted.jsonl")
args = parser.parse_args()

llm = LLM(model=args.model, gpu_memory_utilization=0.95, max_model_len=2048 // 4, num_scheduler_steps=8)
pending = list(PROBLEMS)
accepted = {}
for round_ in range(args.rounds):
    if not pending:
        break
    params = SamplingParams(
        n=args.num_samples,
        temperature=0.6 + 0.2 * round_,
        top_p=0.95,
        max_tokens=16,
        seed=round_,
        stop=["<|im_end|>", "\n"],
        include_stop_str_in_output=False,
    )
    messages = [[{"role": "user", "content": problem}] for problem in pending]
    outputs = llm.chat(messages, params, False)
    for problem, output in zip(pending, outputs, strict=True):
        good = [sample.text for sample in output.outputs if is_correct(problem, sample.text)]
        if good:
            accepted[problem] = good[0]
    pending = [problem for problem in pending if problem not in accepted]

with open(args.save_to, "w") as f:
    for problem, answer in accepted.items():
        f.write(json.dumps({"problem": problem, "answer": answer}) + "\n")
print(f"accepted {len(accepted)} of {len(PROBLEMS)}")
