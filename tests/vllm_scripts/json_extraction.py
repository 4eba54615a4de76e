"""Extracts records in the form of a pydantic model."""

import argparse
import json

from pydantic import BaseModel, ConfigDict, Field
from vllm import LLM, SamplingParams

try:
    from vllm.sampling_params import StructuredOutputsParams

    def guided(schema):
        return {"structured_outputs": StructuredOutputsParams(json=schema)}
except ImportError:  # older vLLM
    from vllm.sampling_params import GuidedDecodingParams

    def guided(schema):
        return {"guided_decoding": GuidedDecodingParams(json=schema)}


class Comparison(BaseModel):
    model_config = ConfigDict(extra="forbid")

    larger: int = Field(ge=0, le=9)
    is_certain: bool


def main(args):
    llm = LLM(
        model=args.model,
        max_model_len=512,
        guided_decoding_backend="xgrammar",
        enforce_eager=True,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    params = SamplingParams(temperature=0.0, max_tokens=96, **guided(Comparison.model_json_schema()))
    outputs = llm.generate(["Q: Which is larger, 4 or 7?\nA: ", "Q: Which is larger, 8 or 3?\nA: "], params)
    records = []
    for output in outputs:
        try:
            records.append(Comparison.model_validate_json(output.outputs[0].text))
        except ValueError:
            print("not a record:", output.outputs[0].finish_reason)
            records.append(None)
    print(json.dumps([record and record.model_dump() for record in records]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-3B-Instruct")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.95)
    main(parser.parse_args())
