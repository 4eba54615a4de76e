"""Keeps engine arguments and prompts of several tasks apart, and makes the LLM from the chosen ones."""

import argparse
from dataclasses import asdict
from typing import NamedTuple

from vllm import LLM, EngineArgs, SamplingParams


class ModelRequestData(NamedTuple):
    engine_args: EngineArgs
    prompts: list[str]
    stop_token_ids: list[int] | None = None


def run_sums(model: str, questions: list[str]) -> ModelRequestData:
    engine_args = EngineArgs(
        model=model,
        max_model_len=512,
        max_num_seqs=5,
        trust_remote_code=True,
        limit_mm_per_prompt={"image": 1},
        mm_processor_kwargs=None,
        compilation_config={"level": 0},
    )
    return ModelRequestData(engine_args, [f"Q: {question}\nA:" for question in questions])


def run_chat(model: str, questions: list[str]) -> ModelRequestData:
    engine_args = EngineArgs(model=model, max_model_len=512, max_num_seqs=2, dtype="bfloat16")
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return ModelRequestData(engine_args, [turn.format(question) for question in questions])


model_example_map = {"sums": run_sums, "chat": run_chat}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--model-type", "-m", default="sums", choices=model_example_map.keys())
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()

    questions = [f"What is {10 * i} + {i}?" for i in range(1, args.num_prompts + 1)]
    req_data = model_example_map[args.model_type](args.model, questions)

    # Disable other modalities to save memory
    default_limits = {"image": 0, "video": 0, "audio": 0}
    req_data.engine_args.limit_mm_per_prompt = default_limits | dict(req_data.engine_args.limit_mm_per_prompt or {})

    engine_args = asdict(req_data.engine_args) | {"seed": args.seed}
    llm = LLM(**engine_args)
    sampling_params = SamplingParams(temperature=0, max_tokens=64, stop_token_ids=req_data.stop_token_ids)
    for output in llm.generate(req_data.prompts, sampling_params=sampling_params):
        print(args.model_type, output.outputs[0].text.strip())
