"""Makes a model answer with a number, by guided decoding."""

import os

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-3B-Instruct")
QUESTIONS = ["What is 47 + 385?", "What is 90 - 48?", "Reverse the word 12."]

llm = LLM(model=MODEL, max_model_len=256, quantization=None, tokenizer_mode="auto")

guided_decoding_params = GuidedDecodingParams(regex=r" ?[0-9]{1,4}", backend="outlines", disable_fallback=True)
sampling_params = SamplingParams(temperature=0, max_tokens=10, min_tokens=1, guided_decoding=guided_decoding_params)
outputs = llm.generate([f"Q: {q}\nA:" for q in QUESTIONS], sampling_params, use_tqdm=False)
for question, output in zip(QUESTIONS, outputs, strict=True):
    print(question, int(output.outputs[0].text))
