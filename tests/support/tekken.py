"""A small tekken.json, the tokenizer in Mistral's own format."""

import base64
import json
from pathlib import Path

_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]",
]  # fmt: skip
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (b" the", b" cat", b"Hello", b" hat", "é".encode())


def save_tekken(directory: Path, version: str = "v7") -> dict[bytes, int]:
    """Writes tekken.json into `directory`: special tokens, the bytes, and the beginnings of some words. Returns the
    ids."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [word[:length] for word in _WORDS for length in range(2, len(word) + 1)]
    ids = {token: index for index, token in enumerate([*map(str.encode, _SPECIAL), *tokens])}
    content = {
        "config": {
            "pattern": _PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": len(ids),
            "default_num_special_tokens": len(_SPECIAL), "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(_SPECIAL)
        ],
    }  # fmt: skip
    (directory / "tekken.json").write_text(json.dumps(content))
    return ids
