"""Ranks documents for a query, with a cross-encoder or an embedder."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris.", "Bread is baked."]


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="BAAI/bge-reranker-v2-gemma", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    llm = LLM(**vars(args))
    outputs = llm.score(QUERY, DOCUMENTS)
    for document, output in zip(DOCUMENTS, outputs, strict=True):
        print(f"{output.outputs.score:.4f} {document}")
    pairs = llm.score([QUERY] * len(DOCUMENTS), DOCUMENTS, truncate_prompt_tokens=-1, use_tqdm=False)
    print("Same:", all(abs(a.outputs.score - b.outputs.score) < 1e-5 for a, b in zip(outputs, pairs, strict=True)))


if __name__ == "__main__":
    main(parse_args())
