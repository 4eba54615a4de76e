"""Completes a few prompts."""

import argparse

from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
args = parser.parse_args()

prompts = [
    "Q: What is 47 + 385?\nA:",
    "Q: Reverse the word planet.\nA:",
    "Q: Sort the letters of banana.\nA:",
    "Q: Write paged in upper case.\nA:",
]
sampling_params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=20)

if __name__ == "__main__":
    llm = LLM(model=args.model)
    outputs = llm.generate(prompts, sampling_params)
    print("-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}\nOutput:    {generated_text!r}")
        print("-" * 60)
