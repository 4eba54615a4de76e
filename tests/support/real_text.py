"""Text that a trained model predicts."""

from pydoc_data.topics import topics

from nanovllm import LLM


def text_of_topics() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def text_ids(llm: LLM, num_tokens: int) -> list[int]:
    return llm.get_tokenizer()(text_of_topics()[: 8 * num_tokens])["input_ids"][:num_tokens]
