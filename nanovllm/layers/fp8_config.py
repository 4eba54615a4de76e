"""How a checkpoint stores FP8 weights. No torch: the reader of configurations needs it too."""

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Fp8Config:
    """How a model's linear layers get weights in e4m3.

    Args:
        scale_name: name of the scales of a layer's `weight` in the checkpoint; None if its weights are not in FP8, and
            are quantized while they load.
        block: rows and columns of the weight that share a scale; None is a scale per output channel.
        is_per_tensor: the checkpoint has one scale per weight, which is then the scale of every channel.
        ignored: regular expressions that match the checkpoint's names of layers that are not in FP8.
        renames: parts of our layers' names, and the checkpoint's names for them.
    """

    scale_name: str | None = None
    block: tuple[int, int] | None = None
    is_per_tensor: bool = False
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def applies_to(self, layer: str) -> bool:
        """layer: our name, such as model.layers.0.self_attn.q_proj."""
        name = f"{layer}."  # renames contain the dots around parts
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return not any(_compiled(pattern).search(name[:-1]) for pattern in self.ignored)


# The lists of models with many experts are longer than the cache of `re`.
_compiled = cache(re.compile)
