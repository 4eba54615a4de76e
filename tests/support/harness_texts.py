"""Shared by the tests of the evaluation harnesses: short options, prompts, and a model without a tokenizer."""

import shutil
from pathlib import Path

from nanovllm.demo import MODEL_DIRECTORY

OPTIONS = {"device": "cpu", "max_model_len": 96, "num_kvcache_blocks": 64}
SUM, WORD = "Q: What is 12 + 30?\nA:", "Q: Reverse the word planet.\nA:"
LONG = "".join(f"Q: What is {n} + {n + 3}?\nA: {2 * n + 3}\n" for n in range(1, 12))
# Chat templates that read a content as a string, and as a list of parts.
_CALLS = "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments }}){% endfor %}"
TEMPLATES = [
    "{% for m in messages %}{{ m.content }}" + _CALLS + "{% endfor %}",
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}" + _CALLS + "{% endfor %}",
]


def without_tokenizer(directory: Path) -> str:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL_DIRECTORY / name, directory)
    return str(directory)
