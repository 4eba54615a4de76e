"""The names of a checkpoint's tensors: finds the model's name for each, and splits tensors of all experts."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from nanovllm.layers.shard import Shard
from nanovllm.models.decoder import CausalLM
from nanovllm.models.tensors import AnyTensor, PackedExpert, Tensors
from nanovllm.models.wrappers import TEXT_PREFIXES, is_of_other_part

logger = logging.getLogger(__name__)

# An expert's tensors, and the tensor of all experts that may hold them.
_PACKED = {"gate_proj.weight": "gate_up_proj", "up_proj.weight": "gate_up_proj", "down_proj.weight": "down_proj"}


class _HasName(Protocol):
    @property
    def what(self) -> str:
        """Its description in errors."""


_Named = TypeVar("_Named", bound=_HasName)


def named_as_expected(
    model: CausalLM, expected: Mapping[str, list[Shard]], tensors: Iterable[tuple[str, AnyTensor]]
) -> dict[str, AnyTensor]:
    """The tensors by the model's names: those of `expected`, and that of a tied head beside its embedding.

    Checkpoints of the decoder alone leave out "model.". A model that wraps ours puts other prefixes before its names,
    such as "language_model.model.". Each name must have the prefix that most names have, or the beginning of it, as LM
    heads do. A tied model may store the LM head in place of the embedding. One tensor may hold a projection of all
    experts.

    In a wrapped model, tensors of other parts are left out, and only the prefixes of TEXT_PREFIXES are known. A model
    without a head leaves out an LM head.

    Args:
        expected: from `loader.expected_tensors`.

    Raises:
        ValueError: the model has no such tensor, or two tensors have the same name.
    """
    packed_names = _packed_names(expected)
    known = by_model_names(model, (*expected, *model.tied_weights, *packed_names), tensors, "parameter")
    packed = {name: tensor for name, tensor in known if name in packed_names}
    found: dict[str, AnyTensor] = {}
    for name, tensor in known:
        parts: Iterable[tuple[str, AnyTensor]] = [(name, tensor)]
        if name in packed:
            parts = _unpacked(name, packed, packed_names, expected, model.is_wrapped)
        for each, part in parts:
            if each in found:
                raise ValueError(f"{found[each].what} and {part.what} are the same tensor; keep one of them")
            found[each] = part
    for head, embedding in model.tied_weights.items():
        if head in found and embedding not in found:
            found[embedding] = found.pop(head)
    return found


def by_model_names(
    model: CausalLM, names: Iterable[str], tensors: Iterable[tuple[str, _Named]], kind: str
) -> list[tuple[str, _Named]]:
    """(name, tensor) pairs with the model's names in place of a checkpoint's; see `named_as_expected`.

    Args:
        names: the model's names.
        kind: a noun for them, for errors.

    Raises:
        ValueError: the model has no such tensor.
    """
    bare_names = {name.removeprefix("model."): name for name in names}
    splits = [(*_split(name, bare_names), tensor) for name, tensor in _of_model(model, list(tensors))]
    counts = Counter(prefix for prefix, bare, _ in splits if bare in bare_names)
    usual = max(counts, key=lambda prefix: (counts[prefix], len(prefix)), default="")
    known: list[tuple[str, _Named]] = []
    for prefix, bare, tensor in splits:
        is_known = bare in bare_names and usual.startswith(prefix) and (not model.is_wrapped or prefix in TEXT_PREFIXES)
        # Old Llama checkpoints also store frequencies, which follow from the config.
        if not is_known and not bare.endswith(".rotary_emb.inv_freq"):
            hint = _hint(model, prefix + bare, usual)
            raise ValueError(f"unexpected {tensor.what}; the model has no such {kind}{hint}")
        known.append((bare_names.get(bare, bare), tensor))
    return known


def _of_model(model: CausalLM, tensors: list[tuple[str, _Named]]) -> list[tuple[str, _Named]]:
    """The tensors without those of parts that the model lacks. A trainer may send those of each part in calls of their
    own."""

    def is_skipped(name: str) -> bool:
        is_of_head = model.head == "none" and not model.tied_weights and "lm_head" in name.split(".")
        return is_of_head or (model.is_wrapped and is_of_other_part(name))

    if skipped := [name for name, _ in tensors if is_skipped(name)]:
        logger.info("skipped %d tensors that the model does not need, such as %s", len(skipped), skipped[0])
    return [(name, tensor) for name, tensor in tensors if not is_skipped(name)]


def _hint(model: CausalLM, name: str, usual: str) -> str:
    """The end of the error about an unexpected tensor; empty if its name shows no reason.

    Args:
        usual: the prefix that most names have.
    """
    if any(f".experts.{projection}" in name for projection in _PACKED.values()) and "_scale" in name:
        return "; FP8 weights of experts and their scales must be in tensors of their own, expert by expert"
    if model.head == "score" and not {"score", "lm_head"}.isdisjoint(name.split(".")):
        return "; beside the decoder, a classification model has only score.weight: no bias, other layer or LM head"
    if model.is_wrapped and not name.startswith(TEXT_PREFIXES[:-1]):
        known = f"{', '.join(TEXT_PREFIXES[:-2])} or {TEXT_PREFIXES[-2]}"
        return f"; the names of the text part must begin with {known}"
    return f"; most names begin with {usual}" * (model.is_wrapped and not name.startswith(usual))


def _packed_names(expected: Iterable[str]) -> dict[str, list[str]]:
    """Name of a tensor that may hold a projection of all experts -> the names of the experts' own tensors, expert by
    expert, gate before up."""
    packed: dict[str, list[str]] = {}
    for name in expected:
        module, _, of_expert = name.partition(".experts.")
        if projection := _PACKED.get(of_expert.partition(".")[2]):
            packed.setdefault(f"{module}.experts.{projection}", []).append(name)
    return packed


def _unpacked(
    name: str,
    packed: Tensors,
    packed_names: Mapping[str, list[str]],
    expected: Mapping[str, list[Shard]],
    is_wrapped: bool,
) -> Iterator[tuple[str, PackedExpert]]:
    """Splits a tensor of all experts into the experts' own tensors.

    It is [num_experts, rows, columns] as in transformers' modules, or has rows and columns exchanged as in Qwen3-VL's
    checkpoints. The shape decides. If it is square, that of the layer's other tensor of all experts decides. Without
    that tensor, the layout is that of the modules, except in a wrapped model.

    Args:
        packed: all such tensors that are given.
        packed_names: see `_packed_names`.

    Raises:
        ValueError: it has another shape, or it is square and the other tensor is needed, but not given.
    """
    tensor, names = packed[name], packed_names[name]
    is_gate_up = name.endswith("gate_up_proj")
    rows, columns = expected[names[0]][0].shape
    shape = len(names) // (1 + is_gate_up), rows * (1 + is_gate_up), columns
    exchanged, found = (shape[0], shape[2], shape[1]), tensor.shape
    if found not in (shape, exchanged):
        raise ValueError(f"{tensor.what} has shape {list(found)}, the model needs {list(shape)}")
    is_exchanged = found != shape
    if shape == exchanged:
        other = f"{name.rpartition('.')[0]}.{'down_proj' if is_gate_up else 'gate_up_proj'}"
        if other in packed:
            other_rows = expected[packed_names[other][0]][0].shape[0] * (2 - is_gate_up)
            is_exchanged = packed[other].shape[1:2] != (other_rows,)
        elif is_wrapped:
            raise ValueError(f"the shape of {tensor.what} does not tell rows from columns; give {other} with it")
    for index, each in enumerate(names):
        expert, part = divmod(index, 1 + is_gate_up)
        yield each, PackedExpert(tensor, expert, part * rows, (rows, columns), is_exchanged)


def _split(name: str, bare_names: Collection[str]) -> tuple[str, str]:
    """(prefix, bare name); ("", name) if no end of the name is a bare name. A prefix contains no number of a layer."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        bare = ".".join(parts[index:])
        if bare in bare_names:
            return name.removesuffix(bare), bare
        if part.isdecimal():
            break
    return "", name
