"""Ranks documents with the original Qwen3-Reranker, which answers "yes" or "no"."""

import sys

from vllm import LLM

PREFIX = "<|im_start|>system\nAnswer only yes or no.<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUERIES = ["What is the capital of China?", "Explain gravity"]
DOCUMENTS = ["The capital of China is Beijing.", "Gravity is a force that attracts two bodies towards each other."]


def main(model: str) -> None:
    llm = LLM(
        model=model,
        task="score",
        hf_overrides={
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        },
    )
    queries = [f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {query}\n" for query in QUERIES]
    documents = [f"<Document>: {document}{SUFFIX}" for document in DOCUMENTS]
    for output in llm.score(queries, documents):
        print(f"{output.outputs.score:.6e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-Reranker-0.6B")
