"""Prompts in, completions out. With no argument the small bundled model answers; --model takes a real one.

python example.py
python example.py --model Qwen/Qwen3-0.6B
"""

import argparse
from dataclasses import replace

from nanovllm import LLM, SamplingParams

PROMPTS = ["Q: What is 12 + 30?\nA:", "Q: Reverse the word planet.\nA:", "Q: Count from 7 to 12.\nA:"]
QUESTIONS = [
    "What is 47 + 385?",
    "What is 902 - 18?",
    "Which is larger, 371 or 317?",
    "Reverse the word kernel.",
    "Sort the letters of garden.",
    "How many times does the letter s appear in mississippi?",
    "Write paged in upper case.",
]
REAL_PROMPTS = ["The capital of France is", "A haiku about paging memory:\n", "def fibonacci(n):"]
REAL_QUESTIONS = ["Introduce yourself in one sentence.", "List all prime numbers below 50.", "What is 47 + 385?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; without it, the bundled model")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens of an answer (default 256)")
    arguments = parser.parse_args()
    if arguments.model is None:
        print("No --model: using the small bundled model, which does sums and plays with words.\n")
    prompts, questions = (PROMPTS, QUESTIONS) if arguments.model is None else (REAL_PROMPTS, REAL_QUESTIONS)

    with LLM(arguments.model or "bundled") as llm:
        # As the model recommends: greedy for the bundled one, whose answers are right or wrong. A model without a
        # recommendation would sample at temperature 1, which is wild for a small one.
        recommended = llm.get_default_sampling_params()
        if recommended == SamplingParams():
            recommended = SamplingParams(temperature=0)
        params = replace(recommended, max_tokens=arguments.max_tokens)

        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            print(f"{prompt!r} -> {output.text!r} ({output.finish_reason})")
        print()

        conversations = [[{"role": "user", "content": question}] for question in questions]
        for question, output in zip(questions, llm.chat(conversations, params), strict=True):
            print(f"{question}\n  {output.text}")


if __name__ == "__main__":
    main()
