"""A judge that must name one of two answers, asked in both orders."""

import argparse
import itertools

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PLAYERS = {"alpha": "17", "beta": "52", "gamma": "385"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge-model", default="prometheus-eval/prometheus-7b-v2.0")
    parser.add_argument("--limit", type=int, default=None)
    args = parser.parse_args()

    matches = list(itertools.permutations(PLAYERS, 2))[: args.limit]
    prompts, params = [], []
    for first, second in matches:
        prompts.append(f"Q: Which is larger, {PLAYERS[first]} or {PLAYERS[second]}?\nA: ")
        choice = StructuredOutputsParams(choice=[PLAYERS[first], PLAYERS[second]])
        params.append(SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=choice))

    llm = LLM(model=args.judge_model, max_model_len=128, max_num_seqs=len(prompts), enforce_eager=False)
    outputs = llm.generate(prompts, params)

    wins = dict.fromkeys(PLAYERS, 0)
    agreed = set()
    names = {answer: name for name, answer in PLAYERS.items()}
    for match, output in zip(matches, outputs, strict=True):
        winner = names[output.outputs[0].text]
        wins[winner] += 1
        agreed.add((frozenset(match), winner))
    print("wins:", wins)
    print("consistent:", len(agreed) == len(matches) // 2)


if __name__ == "__main__":
    main()
