"""The bundled model: a small Qwen3 that does sums and plays with words, for trying nanovllm without a download.

`docs/train_demo.py` in the repository trained it on problems.py.
"""

from pathlib import Path

MODEL_DIRECTORY = Path(__file__).parent / "model"
