"""Generates with and without an adapter."""

import argparse

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
parser.add_argument("--lora-path", default=None)
args = parser.parse_args()

llm = LLM(model=args.model, enable_lora=args.lora_path is not None, max_lora_rank=16, max_model_len=128)
lora_request = LoRARequest("adapter", 1, args.lora_path) if args.lora_path else None
outputs = llm.generate(
    ["Q: What is 7 + 7?\nA:"], SamplingParams(temperature=0, max_tokens=8), lora_request=lora_request
)
print(outputs[0].outputs[0].text.strip())
