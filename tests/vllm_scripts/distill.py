"""Makes data for distillation: sampled answers of a teacher, without repeated and cut ones, as conversations."""

import argparse
import hashlib
import json
import random

from vllm import LLM, SamplingParams

TEMPLATES = ["Reverse the word {w}.", "Write {w} in upper case.", "Sort the letters of {w}."]
WORDS = ["orange", "table", "silver"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="Qwen/Qwen2.5-72B-Instruct")
    parser.add_argument("--output-file", required=True)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--samples-per-prompt", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()

    rng = random.Random(0)
    questions = [template.format(w=word) for template in TEMPLATES for word in WORDS]
    rng.shuffle(questions)
    questions = questions[: args.num_prompts]

    llm = LLM(
        model=args.teacher,
        tensor_parallel_size=args.tensor_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=512,
        max_num_seqs=256,
        trust_remote_code=True,
        distributed_executor_backend="mp",
    )
    params = SamplingParams(
        n=args.samples_per_prompt,
        temperature=args.temperature,
        top_p=0.9,
        top_k=50,
        min_p=0.02,
        max_tokens=args.max_new_tokens,
        seed=7,
        stop_token_ids=[llm.get_tokenizer().eos_token_id],
    )
    outputs = llm.chat([[{"role": "user", "content": q}] for q in questions], params)

    seen, kept, dropped = set(), 0, 0
    with open(args.output_file, "w") as f:
        for question, output in zip(questions, outputs, strict=True):
            for sample in output.outputs:
                answer = sample.text.strip()
                key = hashlib.md5(f"{question}\n{answer}".encode()).hexdigest()
                if key in seen or sample.finish_reason != "stop":
                    dropped += 1
                    continue
                seen.add(key)
                kept += 1
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                f.write(json.dumps({"id": key, "messages": messages, "tokens": len(sample.token_ids)}) + "\n")
    print(f"kept {kept}, dropped {dropped}")


if __name__ == "__main__":
    main()
