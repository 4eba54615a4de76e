"""Tiny random Qwen3 checkpoints, written by transformers. Tests compare the engine with them."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from nanovllm.demo import MODEL_DIRECTORY

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def make_model(seed: int = 0, rope: dict[str, Any] | None = None, **overrides) -> "Qwen3ForCausalLM":
    """A float32 model of TINY's size with random parameters, norms and biases included, so that a lost one would show.

    Args:
        rope: rope_parameters as transformers 5 has them, rope_theta included.
        overrides: fields of Qwen3Config.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM  # slow to import, and not every test makes a model
    from transformers.utils import logging

    logging.disable_progress_bar()
    rope = dict(rope or {"rope_type": "default", "rope_theta": 10000.0})
    if hasattr(Qwen3Config(), "rope_parameters"):
        overrides["rope_parameters"] = rope
    else:  # transformers 4
        overrides["rope_theta"] = rope.pop("rope_theta")
        overrides["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    model = Qwen3ForCausalLM(Qwen3Config(**{**TINY, **overrides})).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that greedy completions wander instead of repeating one token.
            parameter.normal_(0, 0.3, generator=generator)
            if "norm" in name:
                parameter.add_(1)
    return model


def stable_id(value: object) -> str:
    """A test's name for a parameter: without addresses, which differ between the processes of a run."""
    return re.sub(r" at 0x\w+", "", value if isinstance(value, str) else repr(value))


def save_model(directory: Path, seed: int = 0, rope: dict[str, Any] | None = None, **overrides) -> "Qwen3ForCausalLM":
    """Writes `make_model`'s checkpoint into `directory` and returns the model."""
    model = make_model(seed, rope, **overrides)
    model.save_pretrained(directory)
    return model


def save_demo_model(directory: Path, num_layers: int) -> Path:
    """Writes the first layers of the bundled model into `directory`, with its tokenizer; returns the directory."""
    shutil.copytree(MODEL_DIRECTORY, directory, dirs_exist_ok=True)
    layers = [f"model.layers.{number}." for number in range(num_layers)]
    tensors = read_tensors(directory)
    kept = {name: x for name, x in tensors.items() if ".layers." not in name or name.startswith(tuple(layers))}
    write_tensors(directory, kept)
    edit_config(directory, remove=("layer_types",), num_hidden_layers=num_layers)
    return directory


def save_demo_classifier(directory: Path, num_labels: int) -> Path:
    """Writes the bundled model with a random classification head into `directory`; returns the directory."""
    shutil.copytree(MODEL_DIRECTORY, directory, dirs_exist_ok=True)
    tensors = read_tensors(directory)
    head = torch.randn(num_labels, 160, generator=torch.Generator().manual_seed(num_labels)) / 10
    write_tensors(directory, {**tensors, "score.weight": head})
    names = {str(number): f"label {number}" for number in range(num_labels)}
    edit_config(directory, architectures=["Qwen3ForSequenceClassification"], id2label=names)
    return directory


def save_embedder_files(directory: Path, **changes) -> Path:
    """Writes the files of sentence-transformers for the mean of all tokens, normalized; returns the directory.

    Args:
        changes: fields of config_sentence_transformers.json, such as `prompts`.
    """
    prefix = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"{prefix}.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 160, "pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": changes,
        "sentence_bert_config.json": {"max_seq_length": 48, "do_lower_case": False},
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


def random_model_options(rng: random.Random) -> dict[str, Any]:
    """`make_model` arguments over the whole family: grouping, tying, bias, free head_dim, odd vocabularies."""
    num_kv_heads = rng.choice((1, 2, 3))
    return {
        "vocab_size": rng.randrange(31, 160),
        "hidden_size": rng.randrange(16, 65, 4),
        "intermediate_size": rng.randrange(16, 80),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": num_kv_heads * rng.choice((1, 2, 3, 4)),
        "num_key_value_heads": num_kv_heads,
        "head_dim": rng.choice((8, 10, 16, 24, 32)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "rope": {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0, 1e6, 5e6))},
    }


def edit_config(directory: Path, remove: tuple[str, ...] = (), **changes) -> None:
    """Changes fields of config.json; those in `remove` go."""
    path = directory / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))


def read_tensors(directory: Path, file_name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(directory / file_name)


def write_tensors(
    directory: Path, tensors: dict[str, torch.Tensor], file_name: str = "model.safetensors"
) -> dict[str, torch.Tensor]:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / file_name)
    return tensors


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]], with_index: bool = True) -> None:
    """Replaces model.safetensors by several files, and an index that names them."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    for file_name, tensors in shards.items():
        write_tensors(directory, tensors, file_name)
    if with_index:
        write_index(directory, {name: file_name for file_name, tensors in shards.items() for name in tensors})


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def perturbed(logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[num_rows, vocab_size]: the scores, divided by the temperature, of which the sampled ids are the largest. Each
    group's best id has the group's score, and the others are lower by the difference of their own noise.
    """
    from nanovllm.ops.sample import GROUP, exponential_noise

    num_rows, vocab_size = logits.shape
    num_groups = -(-vocab_size // GROUP)
    blocks = torch.arange(num_groups * GROUP // 4, device=logits.device)[None]
    scores = logits.new_full((num_rows, num_groups * GROUP), float("-inf"), dtype=torch.float64)
    scores[:, :vocab_size] = logits.double() / temperature
    of_ids = (scores - exponential_noise(seeds, positions, blocks, 1).log()).unflatten(1, (-1, GROUP))
    of_groups = scores.unflatten(1, (-1, GROUP)).logsumexp(-1, keepdim=True)
    of_groups = of_groups - exponential_noise(seeds, positions, blocks, 0)[:, :num_groups].log()[..., None]
    return (of_groups + of_ids - of_ids.amax(-1, keepdim=True)).flatten(1)[:, :vocab_size]
