"""Bans and biases: bad_words, logit_bias, stop tokens and penalties for single requests of one batch."""

import argparse

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.transformers_utils.tokenizer import get_tokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="bigscience/bloomz-560m")
args = parser.parse_args()

tokenizer = get_tokenizer(args.model, tokenizer_mode="auto", trust_remote_code=True)
llm = LLM(model=args.model, tokenizer=args.model, max_model_len=128, logprobs_mode="raw_logprobs")


def first_id(text):
    return tokenizer.encode(text, add_special_tokens=False)[0]


prompt = TokensPrompt(prompt_token_ids=tokenizer.encode("Q: Count from 1 to 9.\nA:", add_special_tokens=False))
requests = {
    "plain": SamplingParams(temperature=0, max_tokens=24),
    "bad_words": SamplingParams(temperature=0, max_tokens=24, bad_words=["5"]),
    "logit_bias": SamplingParams(temperature=0, max_tokens=2, logit_bias={first_id("7"): 100.0}),
    "stop_token": SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[first_id("4")]),
    "stop": SamplingParams(temperature=0, max_tokens=24, stop=" 3", include_stop_str_in_output=True),
    "min_tokens": SamplingParams(temperature=0, max_tokens=4, min_tokens=4, frequency_penalty=0.0),
}
outputs = llm.generate([prompt] * len(requests), list(requests.values()), use_tqdm=False)
for name, output in zip(requests, outputs, strict=True):
    sample = output.outputs[0]
    print(name, repr(sample.text), sample.finish_reason, sample.stop_reason, len(sample.token_ids))
