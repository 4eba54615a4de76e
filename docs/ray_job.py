"""A job over many machines with Ray Data: JSONL or Parquet in, Parquet out, and it resumes where it was stopped.

    pip install -e ".[ray]"
    python docs/ray_job.py prompts/*.jsonl --output answers --model Qwen/Qwen3-0.6B --prompt prompt --actors 8

It runs on the Ray cluster that it finds (`ray job submit`, or RAY_ADDRESS), else on this machine. All machines must see
the paths and the model. Each row needs an id of its own. A row that cannot run has its reason in the column `error`.

Resuming: give the same command again. Ray keeps the ids of the rows that it has written next to the output
(CheckpointConfig of Ray 2.60, which Ray calls beta), and leaves these rows out. Its limits:

- Rows that were computed and not yet written are computed again. With a seed they give the same tokens, up to rounding.
- The ids must differ. Resuming leaves out every row whose id has been written.
- A changed prompt, model or parameter is not noticed. Use another output directory then.
- Ray removes the ids when a job has succeeded. The same command then computes all rows again, next to the old ones.
- Rows with an error count as written.
"""

import argparse
import json
import os

import ray
from ray.data.checkpoint import CheckpointConfig

from nanovllm.integrations.ray_data import Rows, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", help="files of JSON lines, or .parquet files")
    parser.add_argument("--output", required=True, help="a directory, or a bucket such as s3://bucket/answers")
    parser.add_argument("--model", required=True, help="a directory that all machines see, or a hub name")
    columns = parser.add_mutually_exclusive_group(required=True)
    columns.add_argument("--prompt", help="the column of prompts")
    columns.add_argument("--messages", help="the column of conversations")
    parser.add_argument("--id", default="id", help="the column of ids (default id)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampling", type=json.loads, help="""for all rows, such as '{"max_tokens": 512}'""")
    parser.add_argument("--options", type=json.loads, default={}, help="""of LLM, such as '{"max_model_len": 4096}'""")
    parser.add_argument("--actors", type=int, default=1, help="how many LLMs (default 1)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of a batch (default 128)")
    parser.add_argument("--batches", type=int, default=32, help="batches that an actor has at a time (default 32)")
    parser.add_argument("--rows-per-file", type=int, default=1000, help="minimum rows of a file (default 1000)")
    arguments = parser.parse_args()

    is_remote = "://" in arguments.output
    output = arguments.output if is_remote else os.path.abspath(arguments.output)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column=arguments.id, checkpoint_path=f"{output}.checkpoint"
    )
    read = ray.data.read_parquet if arguments.input[0].endswith(".parquet") else ray.data.read_json
    rows = Rows(
        prompt=arguments.prompt,
        messages=arguments.messages,
        sampling_params=arguments.sampling,
        id=arguments.id,
        seed=arguments.seed,
    )
    answers = generate(
        read(arguments.input),
        arguments.model,
        rows,
        concurrency=arguments.actors,
        batch_size=arguments.batch_size,
        batches_in_flight=arguments.batches,
        options=arguments.options,
    )
    answers.write_parquet(output, mode="append", min_rows_per_file=arguments.rows_per_file)


if __name__ == "__main__":
    main()
