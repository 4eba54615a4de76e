"""Random LoRA adapters, weights that they are added to, and an engine whose requests have adapters in slots."""

import random
import re
from collections.abc import Mapping, Sequence

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Adapter, Pooling
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.models.adapter import LowRank
from nanovllm.models.adapter_slots import check_fits_beside, load_slot
from nanovllm.models.tensors import Given

# Matrices that are not linear layers, or that take no adapter beside others.
_WITHOUT_SLOTS = re.compile(r"norm|conv1d|\.experts\.|mlp\.gate\.|shared_expert_gate|embed_tokens|lm_head")


def changed_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The weights of a checkpoint that adapters may change beside others."""
    return [name for name, tensor in tensors.items() if tensor.ndim == 2 and not _WITHOUT_SLOTS.search(name)]


def random_adapter(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], max_rank: int, seed: int, dtype=torch.float32
) -> dict[str, LowRank]:
    """An adapter that changes these weights, each with a rank of its own, about as much as the weights are large."""
    generator, rng, adapter = torch.Generator().manual_seed(seed), random.Random(seed), {}
    for name in names:
        rank, (output_size, input_size) = rng.randint(1, max_rank), tensors[name].shape
        a, b = (
            torch.randn(*shape, generator=generator).to(dtype) for shape in ((rank, input_size), (output_size, rank))
        )
        adapter[name] = LowRank(Given(f"A of {name}", a), Given(f"B of {name}", b), rng.uniform(0.1, 0.3) / rank**0.5)
    return adapter


def with_adapter(tensors: Mapping[str, torch.Tensor], adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """The weights with an adapter added, in float64."""
    added = {name: each.scale * (each.b.whole().double() @ each.a.whole().double()) for name, each in adapter.items()}
    return {name: tensor.double() + added.get(name, 0) for name, tensor in tensors.items()}


def load_slots(llm: LLM, adapters: Sequence[Mapping[str, LowRank]]) -> None:
    """Loads adapters into the slots 1, 2, … of an LLM."""
    model = llm.engine.runner.program.model
    for slot, adapter in enumerate(adapters, 1):
        check_fits_beside(model, adapter, f"adapter {slot}")
        load_slot(model, slot, adapter)


def completed_in_slots(
    llm: LLM, rows: Sequence[tuple[list[int], SamplingParams | Pooling, int]]
) -> list[EngineSequence]:
    """Runs requests of (prompt, parameters, slot) together, and returns their first completions. The prefix cache does
    not tell slots apart here, so prompts of different slots must begin with different blocks."""
    engine, ids, finished = llm.engine, [], {}
    for prompt, params, slot in rows:
        add = engine.add_pooled if isinstance(params, Pooling) else engine.add_request
        ids.append(add(prompt, params))
        for seq in engine._unfinished.values():
            if seq.seq_id >= ids[-1]:
                seq.adapter = Adapter(slot, slot)
    while not engine.is_finished():
        finished |= {seq.seq_id: seq for seq in engine.step()}
    return [finished[seq_id] for seq_id in ids]
