"""Rows that must come back as errors, each with a part of its message."""

from pathlib import Path

import numpy as np
import torch

from nanovllm import SamplingParams

NAN, INFINITY = float("nan"), float("inf")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IS_NO_PROMPT = "must be a string or a list of token ids"
HELLO = [{"role": "user", "content": "Hello"}]
BAD_ROWS = {
    "empty string": ("", "empty"),
    "empty list": ([], "empty"),
    "empty array": (np.array([], np.int64), "empty"),
    "none": (None, f"{IS_NO_PROMPT}, not None"),
    "integer": (65, f"{IS_NO_PROMPT}, not 65"),
    "float": (1.5, f"{IS_NO_PROMPT}, not 1.5"),
    "bool": (True, f"{IS_NO_PROMPT}, not True"),
    "complex": (1j, IS_NO_PROMPT),
    "bytes": (b"bytes", f"{IS_NO_PROMPT}, not b'bytes'"),
    "bytearray": (bytearray(b"x"), IS_NO_PROMPT),
    "dict": ({"text": "Hi"}, "a prompt that is a dict has .* this one holds 'text'"),
    "dict of nothing": ({"prompt": None}, "this one holds none of them"),
    "dict with more": ({"prompt": "Hi", "multi_modal_data": [1]}, "this one holds 'multi_modal_data'"),
    "dict of a number": ({"prompt": 5}, '"prompt" must be a string, not 5'),
    "dict of text as ids": ({"prompt_token_ids": "Hi"}, IS_NO_PROMPT),
    "conversation and text": ({"messages": HELLO, "prompt": "Hi"}, "this one holds 'prompt' beside \"messages\""),
    "conversation and ids": ({"messages": HELLO, "prompt_token_ids": [1]}, "this one holds 'prompt_token_ids' beside"),
    "template kwargs of text": ({"prompt": "Hi", "chat_template_kwargs": {}}, "this one holds 'chat_template_kwargs'"),
    "conversation of nothing": ({"messages": []}, "a conversation must be a list of at least one message"),
    "conversation of text": ({"messages": "Hi"}, "a conversation must be a list of at least one message"),
    "message of nobody": ({"messages": [{"content": "Hi"}]}, 'a message must be a dict with "role" and "content"'),
    "template kwargs as a list": (
        {"messages": HELLO, "chat_template_kwargs": [1]},
        r"chat_template_kwargs must be a dict, not \[1\]",
    ),
    "template kwargs of ours": (
        {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs must not hold tokenize; nanovllm sets that itself",
    ),
    "template kwargs without a name": ({"messages": HELLO, "chat_template_kwargs": {1: 2}}, "keywords must be strings"),
    "long conversation": ({"messages": [{"role": "user", "content": "long " * 500}]}, "tokens leave no room"),
    "set": ({1, 2}, IS_NO_PROMPT),
    "generator": ((token for token in (1, 2)), IS_NO_PROMPT),
    "function": (len, IS_NO_PROMPT),
    "path": (Path("file.txt"), IS_NO_PROMPT),
    "params": (GREEDY, IS_NO_PROMPT),
    "nested": ([[1, 2], [3]], r"must be integers, not \[1, 2\]"),
    "array of rows": (np.array([[1, 2]]), r"must be integers, not \[1, 2\]"),
    "tensor of rows": (torch.tensor([[1, 2]]), r"must be integers, not \[1, 2\]"),
    "none inside": ([1, None], "must be integers, not None"),
    "string inside": ([1, "a"], "must be integers, not 'a'"),
    "float inside": ([1, 2.0], "must be integers, not 2.0"),
    "nan inside": ([NAN], "must be integers, not nan"),
    "bool inside": ([1, True], "must be integers, not True"),
    "float array": (np.array([1.0, 2.0]), "must be integers, not 1.0"),
    "bool tensor": (torch.tensor([True]), "must be integers, not True"),
    "negative id": ([65, -1], r"token id -1 is outside the vocabulary \(0 to 258\)"),
    "first id beyond": ([259], r"token id 259 is outside the vocabulary"),
    "id beyond 32 bits": ([2**31], "token id 2147483648 is outside"),
    "id beyond 64 bits": ([65, 2**70], "token id 1180591620717411303424 is outside"),
    "largest unsigned": (np.array([2**64 - 1], np.uint64), "token id 18446744073709551615 is outside"),
    "surrogate": ("\ud800", r"cannot be tokenized: '\\ud800' at position 0 is half a surrogate pair"),
    "surrogate inside": ("well \udfff then", r"cannot be tokenized: '\\udfff' at position 5"),
    "max_model_len": ([65] * 300, "300 tokens leave no room .* max_model_len=300; shorten it, or raise"),
    "beyond max_model_len": ("long " * 500, "2500 tokens leave no room"),
    "far beyond max_model_len": ("long " * 1000, "5000 bytes are more than max_model_len=300 tokens of at most 13"),
    "beyond the cache": ([65] * 252, "may need 17 KV cache blocks .* there are 16; lower max_tokens"),
}
