"""A trained model's embeddings rank documents as transformers does; see test_real_model.py."""

import numpy as np
import pytest
import torch

from nanovllm import LLM

pytestmark = pytest.mark.real

# Scores that are closer than this are a tie.
TIE = 1e-5
# Each query's document; no query asks for OTHERS.
PAIRS = {
    "Why is the sky blue?": "Air scatters short wavelengths of sunlight more than long ones, so the sky looks blue.",
    "How do bees make honey?": "Bees collect nectar, remove its water in the hive, and store it as honey.",
    "What is the capital of France?": "Paris, on the river Seine, is the capital of France.",
    "How does a vaccine work?": "A vaccine shows the immune system a harmless part of a germ, so that it learns it.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote the tragedy of Romeo and Juliet in the 1590s.",
    "How is bread baked?": "Flour, water, salt and yeast become a dough that rises and is baked in an oven.",
    "What causes earthquakes?": "Earthquakes happen when plates of the Earth's crust suddenly slip past each other.",
    "How do I change a bicycle tyre?": "Take off the wheel, lift the tyre with levers, and put in a new tube.",
    "What is a prime number?": "A prime number is larger than one and has no divisors except one and itself.",
    "When did people first land on the moon?": "Apollo 11 brought the first people to the moon in July 1969.",
    "How do plants get energy?": "Plants use light to make sugar from water and carbon dioxide: photosynthesis.",
    "What does a violin sound like?": "The four strings of a violin are bowed, and their tone is high and singing.",
}
OTHERS = [
    "The train to the coast leaves every hour.", "Cats sleep for most of the day.",
    "Steel is iron with a little carbon.", "The parliament voted on the new budget.",
    "A chess game begins with sixteen pieces per side.", "Coffee was first grown in Ethiopia.",
    "The library is closed on Sundays.", "Glaciers carve deep valleys.", "He painted the fence green last summer.",
    "The stock market fell on Monday.", "Wool keeps its wearer warm.", "Her phone needs a new battery.",
]  # fmt: skip


@torch.inference_mode()
def their_embeddings(directory, texts: list[str]) -> np.ndarray:
    """The mean over the tokens of the final norm's hidden states, of length 1."""
    from transformers import AutoModel, AutoTokenizer  # slow to import

    model, tokenizer = (
        AutoModel.from_pretrained(directory, dtype=torch.float32),
        AutoTokenizer.from_pretrained(directory),
    )
    means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()


def test_documents_are_ranked_as_by_transformers(directory):
    texts = [*PAIRS, *PAIRS.values(), *OTHERS]
    exact = their_embeddings(directory, texts)
    with LLM(directory, dtype="float32", max_model_len=2048) as llm:
        found = np.stack([output.embedding for output in llm.embed(texts, pooling="mean", use_tqdm=False)])
    ours, theirs = (each[: len(PAIRS)] @ each[len(PAIRS) :].T for each in (found, exact))
    order = (-ours).argsort(1)
    ranked = np.take_along_axis(theirs, order, 1)
    assert (np.diff(ranked) < TIE).all(), "all 24 ranks of each query"
    best = [float((scores.argmax(1) == range(len(PAIRS))).mean()) for scores in (ours, theirs)]
    same = (order == (-theirs).argsort(1)).mean()
    print(f"accuracy@1 {best[0]:.3f}, transformers {best[1]:.3f}; {same:.4f} of the ranks are the same")
    print(f"largest difference of an embedding's number: {np.abs(found - exact).max():.1e}")
    assert best[0] == best[1] > 1 / 12
