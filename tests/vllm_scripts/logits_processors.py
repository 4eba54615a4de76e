"""Callables that change the logits of each step: one forces a prefix, one allows only some tokens."""

import argparse

import torch
from vllm import LLM, SamplingParams


class ForcePrefix:
    """Makes a completion begin with given tokens."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    def __call__(self, token_ids, logits):
        step = len(token_ids)
        if step < len(self.token_ids):
            mask = torch.full_like(logits, float("-inf"))
            mask[self.token_ids[step]] = 0
            logits = logits + mask
        return logits


def main(args):
    llm = LLM(model=args.model, enforce_eager=True, max_model_len=128)
    tokenizer = llm.get_tokenizer()
    space = tokenizer.encode(" ", add_special_tokens=False)

    vocabulary = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    banned = torch.tensor([i for i, text in enumerate(vocabulary) if text.isupper()])

    def no_capitals(prompt_token_ids, token_ids, logits):
        assert tokenizer.decode(prompt_token_ids).startswith("Q: ")
        logits[banned] = float("-inf")
        return logits

    prompt = "Q: Write paged in upper case.\nA:"
    plain = SamplingParams(temperature=0, max_tokens=8)
    lower = SamplingParams(temperature=0, max_tokens=8, logits_processors=[no_capitals])
    forced_ids = space + tokenizer.encode("PAG", add_special_tokens=False)
    forced = SamplingParams(temperature=0, max_tokens=8, logits_processors=[ForcePrefix(forced_ids)])
    outputs = llm.generate([prompt, prompt, prompt], [plain, lower, forced], use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    print("plain:", texts[0])
    print("capitals:", any(character.isupper() for character in texts[1]))
    print("forced:", texts[2])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2")
    main(parser.parse_args())
