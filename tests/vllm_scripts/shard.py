"""One of several processes that share a data set: each answers every n-th row, and writes a file of its own."""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

parser = argparse.ArgumentParser()
parser.add_argument("--model-path", type=Path, default="Qwen/Qwen2.5-7B-Instruct")
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out-dir", type=Path, required=True)
parser.add_argument("--shard-id", type=int, default=0)
parser.add_argument("--num-shards", type=int, default=1)
parser.add_argument("--gpu", type=str, default=None)


def main(args):
    if args.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    from vllm import LLM, SamplingParams
    from vllm.logger import init_logger

    logger = init_logger(__name__)
    rows = json.loads(args.data.read_text())
    mine = rows[args.shard_id :: args.num_shards]
    logger.info("shard %d of %d has %d rows", args.shard_id, args.num_shards, len(mine))

    llm = LLM(
        str(args.model_path),
        max_model_len=1024,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        seed=args.shard_id,
    )
    messages = [[{"role": "user", "content": row["question"]}] for row in mine]
    sampling = SamplingParams(temperature=0.0, max_tokens=48)
    outputs = llm.chat(messages, sampling, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})

    args.out_dir.mkdir(parents=True, exist_ok=True)
    path = args.out_dir / f"part-{args.shard_id:05d}-of-{args.num_shards:05d}.json"
    for row, output in zip(mine, outputs, strict=True):
        row["prediction"] = output.outputs[0].text.strip()
    path.write_text(json.dumps(mine, indent=2))
    print("wrote", path.name)


if __name__ == "__main__":
    main(parser.parse_args())
