"""Classifies texts by the log-probabilities of the labels' first tokens."""

import argparse
import math

import numpy as np
from vllm import LLM, SamplingParams

LABELS = ["0", "1", "2", "3", "4"]
TEMPLATE = "Q: How many times does the letter {letter} appear in {text}?\nA: "


def label_token_ids(tokenizer):
    ids = {}
    for label in LABELS:
        tokens = tokenizer.encode(label, add_special_tokens=False)
        assert len(tokens) == 1, f"label {label!r} is {len(tokens)} tokens"
        ids[label] = tokens[0]
    return ids


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
    ap.add_argument("--dtype", default="bfloat16")
    ap.add_argument("--max-num-seqs", type=int, default=16)
    args = ap.parse_args()

    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_logprobs=20,
        enable_prefix_caching=True,
        trust_remote_code=True,
    )
    ids = label_token_ids(llm.get_tokenizer())
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=len(LABELS), allowed_token_ids=list(ids.values()), seed=42
    )
    examples = [("a", "banana"), ("p", "apple"), ("s", "mississippi"), ("z", "garden")]
    outputs = llm.generate([TEMPLATE.format(letter=a, text=b) for a, b in examples], params, use_tqdm=False)

    for (letter, text), output in zip(examples, outputs, strict=True):
        first = output.outputs[0].logprobs[0]
        scores = np.array([first[ids[label]].logprob if ids[label] in first else -math.inf for label in LABELS])
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        best = int(probs.argmax())
        sure = "sure" if probs[best] > 0.5 else "unsure"
        print(f"{text}/{letter}: {LABELS[best]} ({sure})")


if __name__ == "__main__":
    main()
