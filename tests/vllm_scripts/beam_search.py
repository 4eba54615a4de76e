"""Beam search."""

import argparse

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="facebook/opt-125m")
args = parser.parse_args()

llm = LLM(model=args.model, max_model_len=128)
for output in llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=4, max_tokens=8)):
    print(output.sequences[0].text)
