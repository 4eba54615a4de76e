"""Shared by the tests of the evaluation harnesses: short options, prompts, and a model without a tokenizer."""

import shutil
from pathlib import Path

from nanovllm.demo import MODEL_DIRECTORY

OPTIONS = {"device": "cpu", "max_model_len": 96, "num_kvcache_blocks": 64}
SUM, WORD = "Q: What is 12 + 30?\nA:", "Q: Reverse the word planet.\nA:"
LONG = "".join(f"Q: What is {n} + {n + 3}?\nA: {2 * n + 3}\n" for n in range(1, 12))


def without_tokenizer(directory: Path) -> str:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL_DIRECTORY / name, directory)
    return str(directory)
