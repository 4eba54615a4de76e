"""Merges a LoRA adapter into the weights of a model, and brings back the exact weights without it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn

from nanovllm.layers.linear import Packable
from nanovllm.layers.quantization import FormattedWeight
from nanovllm.layers.shard import Shard
from nanovllm.models.adapter import LowRank, linear_layers
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import expected_of
from nanovllm.ops.pinned import host_like

_MAX_BYTES = 2**26  # of a float64 matrix; small beside the memory that a full KV cache leaves free


class MergedWeights:
    """The weights of a model with at most one adapter merged into them.

    The host keeps a copy, without an adapter, of each weight that an adapter has changed. The copy is made when the
    weight is first changed, and it is pinned if the model is on a GPU. A switch then copies weights to the device, and
    never back.

    Args:
        model: of this rank.
    """

    def __init__(self, model: CausalLM):
        self._model = model
        self._copies: dict[str, list[torch.Tensor]] = {}  # by checkpoint name; one per shard
        self._changed: set[str] = set()  # weights that may differ from their copies

    @cached_property
    def _layers(self) -> dict[str, tuple[str, nn.Module]]:
        """The module of each weight, by the weight's name in a checkpoint."""
        layers = linear_layers(self._model)
        return {name: (prefix, module) for prefix, module, shards in layers for name in shards}

    @property
    def is_merged(self) -> bool:
        """Whether weights may hold an adapter, or a part of one."""
        return bool(self._changed)

    def check(self) -> None:
        """Raises a ValueError if adapters cannot be merged into this model."""
        if any(isinstance(each, FormattedWeight) and each.format is not None for each in self._model.modules()):
            raise ValueError("an adapter cannot be merged into weights in FP8; it must be computed beside them")

    @torch.no_grad()
    def merge(self, adapter: Mapping[str, LowRank] | None) -> None:
        """Sets the weights to those without an adapter plus the adapter's change, rounded once; exact for None.

        The parameters keep their memory. After an exception some weights hold an adapter and some do not; the next call
        that succeeds leaves no trace of that.

        Args:
            adapter: from `check_fits`.

        Raises:
            ValueError: as `check`.
        """
        if adapter:
            self.check()
        adapter = adapter or MappingProxyType({})
        weight = next(self._model.parameters())
        stream = torch.cuda.Stream(weight.device) if weight.is_cuda else None
        if stream is not None:  # earlier steps still read the weights
            stream.wait_stream(torch.cuda.current_stream(weight.device))
        of_layers: dict[str, list[str]] = {}
        for name in sorted(self._changed | adapter.keys()):
            of_layers.setdefault(self._layers[name][0], []).append(name)
        for prefix, names in of_layers.items():
            self._merge_layer(prefix, names, adapter, stream)

    def forget(self, names: Iterable[str]) -> None:
        """Drops the copies of weights that get new values. Those values count as the weights without an adapter."""
        for name in names:
            self._copies.pop(name, None)
            self._changed.discard(name)

    def _merge_layer(
        self, prefix: str, names: list[str], adapter: Mapping[str, LowRank], stream: torch.cuda.Stream | None
    ) -> None:
        model, module = self._model, self._layers[names[0]][1]
        # Before the weight is unpacked: after an interrupt, the next call packs it again.
        were_changed = self._changed.intersection(names)
        self._changed.update(names)
        if isinstance(module, Packable):
            module.unpack()
        shards_of = expected_of(model, prefix, module)
        for name in names:
            shards = shards_of[name]
            if name not in self._copies:
                self._copies[name] = [_copied(shard.target) for shard in shards]
            elif name in were_changed:
                with _beside(stream):
                    for shard, copy in zip(shards, self._copies[name], strict=True):
                        shard.target.copy_(copy, non_blocking=True)
            if name in adapter:
                for shard in shards:
                    _add(shard, adapter[name])
        if isinstance(module, Packable):
            module.pack()
        self._changed.difference_update(set(names) - adapter.keys())


@contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Context manager whose copies overlap with the device's earlier work and precede its later work."""
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host. It may still be incomplete, but later work of the device may read it."""
    return host_like(tensor).copy_(tensor, non_blocking=True)


def _add(shard: Shard, change: LowRank) -> None:
    """Adds a change to a part of a weight."""
    target, (rows, columns) = shard.target, shard.source
    # The library may compute products of float32 in TF32 or bfloat16, but not those of float64.
    a = change.a.part(((0, change.rank), columns)).to(target.device).double()
    b = change.b.part((rows, (0, change.rank))).to(target.device).double()
    num_rows = max(1, _MAX_BYTES // (8 * max(1, target.shape[1])))
    for part, of_part in zip(target.split(num_rows), b.split(num_rows), strict=True):
        part.copy_(part.double().addmm_(of_part, a, alpha=change.scale))
