"""LoRA adapters beside the weights: loads an adapter's factors into a slot of every linear layer."""

from collections.abc import Iterator, Mapping
from math import frexp

import torch

from nanovllm.layers.adapters import AdapterSlots
from nanovllm.layers.linear import LinearBase
from nanovllm.models.adapter import LowRank
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import tensor_name

_MERGE = "give it a call of its own, which merges it into the weights (not with weights in FP8 or deterministic=True)"


def check_fits_beside(model: CausalLM, adapter: Mapping[str, LowRank], what: str) -> None:
    """Checks that the slots of a model have room for an adapter that fits the model.

    Args:
        adapter: the changes, by the names of the weights in `loader.expected_tensors`.
        what: the adapter, for errors.

    Raises:
        ValueError: the rank of a change is too large, or it belongs to a layer without slots, such as an expert.
    """
    slots_of = {name: slots for name, slots, _ in _parts(model)}
    for name, change in adapter.items():
        if name not in slots_of:
            raise ValueError(
                f"{what} changes {name}, which takes no adapter beside others (embeddings, LM heads, experts and their "
                f"routers do not); {_MERGE}"
            )
        rank, max_rank = change.rank, slots_of[name].max_rank
        if rank > max_rank:
            raise ValueError(
                f"{what} changes {name} with rank {rank}, but adapters beside each other have at most "
                f"max_lora_rank={max_rank}; set max_lora_rank={rank}, or {_MERGE}"
            )


@torch.no_grad()
def load_slot(model: CausalLM, slot: int, adapter: Mapping[str, LowRank]) -> None:
    """Loads an adapter that `check_fits_beside` has checked. It takes the place of the adapter in the slot, if any.

    Args:
        slot: from 1 on.
        adapter: the changes, by the names of the weights in `loader.expected_tensors`.
    """
    for module in model.modules():
        if isinstance(module, AdapterSlots):
            module.clear(slot)
    for name, slots, key in _parts(model):
        if name in adapter:
            change = adapter[name]
            of_a, of_b = slots.factor_shards(slot, key, change.rank)
            scale = change.scale
            for factor, shards in ((change.a, [of_a]), (change.b, of_b)):
                power = _power_of_two(factor.whole()) if of_a.target.dtype == torch.float16 else 1.0
                scale *= power
                for shard in shards:
                    # Without this conversion on the host, the copy would need more memory on the device.
                    shard.target.copy_((factor.part(shard.source) / power).to(shard.target.dtype))
            slots.set_scale(slot, key, scale)


def _power_of_two(factor: torch.Tensor) -> float:
    """About the largest number of a factor. Divided by it, all numbers are in the range of float16, and keep their
    bits if they were before."""
    largest = float(factor.abs().max())
    return 2.0 ** frexp(largest)[1] if largest else 1.0


def _parts(model: CausalLM) -> Iterator[tuple[str, AdapterSlots, str]]:
    """The weights that adapters may change beside others: (name in the checkpoint, slots, key in the slots)."""
    for prefix, module in model.named_modules():
        if isinstance(module, LinearBase) and (slots := module.adapter_slots) is not None:
            for key in slots.keys:
                yield tensor_name(model, prefix, key, "weight"), slots, key
