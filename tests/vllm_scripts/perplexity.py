"""Perplexity of texts from the log-probabilities of their prompt tokens; the lower one of each pair wins."""

import argparse
import math

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

PAIRS = [
    ("Q: What is 47 + 385?\nA: 432", "Q: What is 47 + 385?\nA: 519"),
    ("Q: Reverse the word planet.\nA: planet", "Q: Reverse the word planet.\nA: tenalp"),
    ("Q: Write paged in upper case.\nA: PAGED", "Q: Write paged in upper case.\nA: paged"),
]


def perplexity(output):
    total, count = 0.0, 0
    for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
        if position is None:  # the first token
            continue
        total += position[token_id].logprob
        count += 1
    return math.exp(-total / count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--max_model_len", type=int, default=512)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    llm = LLM(
        model=args.model, max_model_len=args.max_model_len, gpu_memory_utilization=0.8, enable_prefix_caching=False
    )
    texts = [text for pair in PAIRS for text in pair]
    prompts = [TokensPrompt(prompt_token_ids=tokenizer(text)["input_ids"]) for text in texts]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0))
    values = [perplexity(output) for output in outputs]
    for i in range(0, len(values), 2):
        winner = texts[i] if values[i] < values[i + 1] else texts[i + 1]
        print("winner:", winner.splitlines()[-1], f"ratio > 2: {max(values[i : i + 2]) / min(values[i : i + 2]) > 2}")
