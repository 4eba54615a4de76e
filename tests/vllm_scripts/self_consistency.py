"""Self-consistency: several sampled answers per question, of which the most frequent one counts."""

import argparse
import re
from collections import Counter

from vllm import LLM, SamplingParams

PROBLEMS = [("What is 47 + 385?", "432"), ("What is 90 - 48?", "42"), ("Which is larger, 17 or 71?", "71")]


def extract(text):
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="deepseek-ai/deepseek-math-7b-rl")
    parser.add_argument("--n_sampling", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    llm = LLM(
        model=args.model_name_or_path, seed=args.seed, trust_remote_code=True, tensor_parallel_size=1, swap_space=60
    )
    params = SamplingParams(
        n=args.n_sampling,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=16,
        stop=["\n\n", "Q:", "</s>"],
    )
    outputs = llm.generate([f"Q: {question}\nA:" for question, _ in PROBLEMS], params)
    outputs = sorted(outputs, key=lambda x: int(x.request_id))

    num_correct = 0
    for (_, answer), output in zip(PROBLEMS, outputs, strict=True):
        assert len(output.outputs) == args.n_sampling
        votes = Counter(extract(sample.text) for sample in output.outputs)
        prediction, num_votes = votes.most_common(1)[0]
        num_correct += prediction == answer
        print(f"gold={answer} pred={prediction} majority={num_votes > args.n_sampling // 2}")
    print(f"maj@{args.n_sampling}: {num_correct / len(PROBLEMS):.2f}")


if __name__ == "__main__":
    main()
