"""Passes a LoRARequest from the driver to the ranks: in the log. Tensors in memory become files beside it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.lora import LoRARequest
from nanovllm.models.directory import find_adapter
from nanovllm.models.tensors import given_tensors
from nanovllm.parallel.weight_files import stored_weights, written_weights


@contextmanager
def sent_adapter(request: LoRARequest | None, meeting_place: str) -> Iterator[list | None]:
    """Context manager that yields the request as JSON holds it; see `received_adapter`. The files exist until it ends.

    Raises:
        RuntimeError, TypeError, ValueError: the tensors cannot be written, or the adapter's directory is not there.
    """
    if request is None:
        yield None
    elif request.tensors is None or request.config is None:
        yield [request.lora_name, request.lora_int_id, str(find_adapter(request).absolute())]
    else:
        config = json.loads(json.dumps(dict(request.config), default=_plain))
        with written_weights(given_tensors(request.tensors.items()), meeting_place) as directory:
            yield [request.lora_name, request.lora_int_id, directory, config]


def received_adapter(sent: list | None) -> LoRARequest | None:
    if sent is None:
        return None
    name, number, directory, *configs = sent
    if not configs:
        return LoRARequest(name, number, directory)
    tensors = {name: tensor.whole() for name, tensor in stored_weights(directory).items()}
    return LoRARequest(name, number, tensors=tensors, config=configs[0])


def _plain(value: Any) -> Any:
    """For JSON, a value of LoraConfig.to_dict(), which has sets."""
    return list(value) if isinstance(value, set | frozenset) else str(value)
