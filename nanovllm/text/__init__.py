"""Tokenizer, chat template, stop strings and detokenizing. Only this package and guides.py know a token's text."""

from nanovllm.text.stop_strings import StopStrings
from nanovllm.text.text import Completion, Text

__all__ = ["Completion", "StopStrings", "Text"]
