"""Files of LoRA adapters, as peft saves them, with random factors."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanovllm.demo import MODEL_DIRECTORY


def save_for_demo_model(directory: Path | str, seed: int = 0, rank: int = 8) -> Path:
    """Writes an adapter of the bundled model's down projections; returns the directory."""
    directory, factors = Path(directory), torch.Generator().manual_seed(seed)
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    sizes = {"A": (rank, config["intermediate_size"]), "B": (config["hidden_size"], rank)}
    prefix = "base_model.model.model.layers"
    tensors = {
        f"{prefix}.{layer}.mlp.down_proj.lora_{half}.weight": torch.randn(size, generator=factors) / 4
        for layer in range(config["num_hidden_layers"])
        for half, size in sizes.items()
    }
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory
