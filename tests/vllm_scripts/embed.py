"""Embeds a few texts, and compares them with each other."""

from argparse import Namespace

import numpy as np
from vllm import LLM, EngineArgs
from vllm.config import PoolerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.print_utils import print_embeddings

TEXTS = ["Hello, my name is", "The capital of France is", "The capital of Italy is"]


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--mean", action="store_true", help="pool all tokens")
    parser.set_defaults(model="intfloat/e5-mistral-7b-instruct", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    options = vars(args)
    if options.pop("mean"):
        options["pooler_config"] = PoolerConfig(pooling_type="MEAN", normalize=True)
    llm = LLM(**options)
    outputs = llm.embed(TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        print(f"Prompt: {text!r}")
        print_embeddings(output.outputs.embedding)
    vectors = np.array([output.outputs.embedding for output in outputs])
    print("Similarity:", (vectors[1] @ vectors[[0, 2]].T).round(4).tolist())
    again = llm.encode(TEXTS[:1], pooling_task="embed", use_tqdm=False)[0]
    print("Same:", np.allclose(again.outputs.data, outputs[0].outputs.embedding, atol=1e-6))


if __name__ == "__main__":
    main(parse_args())
