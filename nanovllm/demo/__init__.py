"""The bundled model: a small Qwen3 that does sums and plays with words, so that nothing need be downloaded."""

from pathlib import Path

MODEL_DIRECTORY = Path(__file__).parent / "model"
