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
        prefixes: names that `ignored` matches begin with one of these in place of our "model.".
    """

    scale_name: str | None = None
    block: tuple[int, int] | None = None
    is_per_tensor: bool = False
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[str, ...] = ("model.",)

    def applies_to(self, layer: str) -> bool:
        """layer: our name, such as model.layers.0.self_attn.q_proj."""
        name = f"{layer}."  # renames contain the dots around parts
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        names = [prefix + name[:-1].removeprefix("model.") for prefix in self.prefixes]
        return not any(_compiled(pattern).search(name) for pattern in self.ignored for name in names)


# The lists of models with many experts are longer than the cache of `re`.
_compiled = cache(re.compile)
