"""Cuts prompts to the model's context, keeping their end, as benchmarks of long contexts do."""

import argparse

from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="togethercomputer/LLaMA-2-7B-32K")
parser.add_argument("--max-new-tokens", type=int, default=16)
args = parser.parse_args()

model = LLM(args.model, max_model_len=200, trust_remote_code=True)
max_len = model.llm_engine.model_config.max_model_len
tokenizer = model.llm_engine.get_tokenizer() if hasattr(model.llm_engine, "get_tokenizer") else model.get_tokenizer()
print("max_model_len:", max_len)

documents = ["A short note. ", "This sentence is here to fill the context. " * 20]
prompts = [document + "\n\nQ: What is 20 + 22?\nA:" for document in documents]
prompt_ids, num_cut = [], 0
for prompt in prompts:
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    if len(ids) > max_len - args.max_new_tokens:
        num_cut += 1
        ids = ids[-(max_len - args.max_new_tokens) :]
    prompt_ids.append({"prompt_token_ids": ids})

sampling_params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens, stop="\n")
outputs = model.generate(prompt_ids, sampling_params, use_tqdm=False)
print("cut:", num_cut, "longest:", max(len(output.prompt_token_ids) for output in outputs))
print("finished:", all(output.finished and output.outputs[0].finish_reason for output in outputs))
