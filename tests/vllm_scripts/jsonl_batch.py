"""Answers the rows of a JSON Lines file in chunks. Rows whose answer is in the output file are left out."""

import argparse
import json
import os

from tqdm import tqdm
from vllm import LLM, SamplingParams


def load_done(path):
    if not os.path.exists(path):
        return set()
    with open(path, encoding="utf-8") as f:
        return {json.loads(line)["id"] for line in f if line.strip()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=str, default="mistralai/Mistral-7B-Instruct-v0.3")
    parser.add_argument("--input", type=str, required=True)
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--max_tokens", type=int, default=32)
    args = parser.parse_args()

    with open(args.input, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    done = load_done(args.output)
    todo = [row for row in rows if row["id"] not in done]
    print(f"{len(rows)} rows, {len(done)} done, {len(todo)} to do")
    if not todo:
        return

    llm = LLM(
        model=args.model,
        tokenizer=args.model,
        trust_remote_code=True,
        tensor_parallel_size=args.tp,
        gpu_memory_utilization=0.9,
        max_model_len=512,
        swap_space=4,
        dtype="auto",
        disable_custom_all_reduce=True,
        enforce_eager=True,
    )
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(n=1, best_of=1, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=args.max_tokens)

    with open(args.output, "a", encoding="utf-8") as f:
        for start in tqdm(range(0, len(todo), args.batch_size), disable=True):
            batch = todo[start : start + args.batch_size]
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": row["question"]}], tokenize=False, add_generation_prompt=True
                )
                for row in batch
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for row, output in zip(batch, outputs, strict=True):
                completion = output.outputs[0]
                record = {
                    **row,
                    "response": completion.text,
                    "finish_reason": completion.finish_reason,
                    "usage": {
                        "prompt_tokens": len(output.prompt_token_ids),
                        "completion_tokens": len(completion.token_ids),
                    },
                }
                f.write(json.dumps(record, ensure_ascii=False) + "\n")
            f.flush()


if __name__ == "__main__":
    main()
