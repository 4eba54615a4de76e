"""Which LoRA adapters a runner holds, and where: one may be merged into the weights, others are in slots."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable

from nanovllm.engine.runner import Runner
from nanovllm.engine.sequence import BASE, Adapter
from nanovllm.lora import LoRARequest


class Adapters:
    """Gives each request's adapter a version, and a place in the runner.

    Args:
        runner: holds the adapters.
        num_slots: the number of slots in the linear layers; 0 without adapters.
        may_merge: see RunnerInfo.
    """

    def __init__(self, runner: Runner, num_slots: int, may_merge: bool):
        self._runner, self._may_merge = runner, may_merge
        self._known: dict[int, tuple[Hashable, int]] = {}  # fingerprint and version of the adapters, by lora_int_id
        self._last_version = 0
        self._merged: int | None = 0  # the version in the weights; None after an interrupted merge
        # The version in each slot, the least recently used first.
        self._slots: OrderedDict[int, int] = OrderedDict.fromkeys(range(1, num_slots + 1), 0)

    @property
    def has_merged(self) -> bool:
        """Whether the weights are not the model's own."""
        return self._merged != 0

    def version_of(self, request: LoRARequest) -> int:
        """The version of a request's adapter. It is new if the adapter's files or tensors have changed since the last
        call."""
        fingerprint = request.fingerprint()
        known, version = self._known.get(request.lora_int_id, (None, 0))
        if known != fingerprint:
            version = self._last_version = self._last_version + 1
            self._known[request.lora_int_id] = fingerprint, version
        return version

    def merge(self, request: LoRARequest | None) -> Adapter | None:
        """Merges an adapter into the weights in place of the one before; None restores the model's own weights. Must
        be called while nothing runs.

        Returns:
            The Adapter of rows that use these weights; None if adapters may not be merged.

        Raises:
            TypeError, ValueError: the adapter does not fit; the weights are as before.
        """
        if request is not None and not self._may_merge:
            return None
        version = 0 if request is None else self.version_of(request)
        if self._merged != version:
            before, self._merged = self._merged, None
            try:
                self._runner.set_adapter(0, request)
            except (TypeError, ValueError):
                self._merged = before
                raise
            self._check_same(request, version)
            self._merged = version
        return Adapter(version)

    def place(
        self, request: LoRARequest | None, version: int, busy_slots: Callable[[], Collection[int]]
    ) -> Adapter | None:
        """Finds the slot of an adapter, or loads the adapter into a slot. Returns None if all slots are busy.

        Args:
            version: the adapter's version.
            busy_slots: returns the slots of unfinished requests and of steps in flight.

        Raises:
            TypeError, ValueError: the adapter does not fit.
        """
        if request is None:
            return BASE
        slot = next((slot for slot, held in self._slots.items() if held == version), None)
        if slot is None:
            busy = busy_slots()
            slot = next((slot for slot in self._slots if slot not in busy), None)
            if slot is None:
                return None
            before, self._slots[slot] = self._slots[slot], 0
            try:
                self._runner.set_adapter(slot, request)
            except (TypeError, ValueError):
                self._slots[slot] = before
                raise
            self._check_same(request, version)
            self._slots[slot] = version
        self._slots.move_to_end(slot)
        return Adapter(version, slot)

    def _check_same(self, request: LoRARequest | None, version: int) -> None:
        """Raises a ValueError if the values that were just loaded may not be those of the version."""
        if request is not None and self._known[request.lora_int_id] != (request.fingerprint(), version):
            raise ValueError(
                f"adapter {request.lora_name!r} changed during the call, or another one has its lora_int_id; call again"
            )

    def check_place(self, adapter: Adapter) -> None:
        """Raises a RuntimeError if a request with this adapter would be computed with other weights."""
        if self._merged != (0 if adapter.slot else adapter.version):
            raise RuntimeError("the weights hold another adapter; call merge_adapter first")

    def forget(self) -> None:
        """The runner's weights and slots were dropped."""
        self._merged = 0
        self._slots = OrderedDict.fromkeys(self._slots, 0)
