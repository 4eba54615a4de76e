"""Measures the host's time for a decode step in scheduler and block manager: `python tests/support/host_cost.py`."""

import time
from collections import deque

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def microseconds_per_sequence(num_seqs: int, block_size: int, num_steps: int = 50, num_repeats: int = 8) -> float:
    """The best of `num_repeats` averages over `num_steps` steps, with one step in flight as in the engine."""
    scheduler = Scheduler(BlockManager(num_seqs * 1024 // block_size * 2, block_size), 1 << 20, num_seqs)
    for seq_id in range(num_seqs):
        # Lengths differ, so that in every step some sequences need a block and some fill one.
        prompt = [seq_id] + [7] * (seq_id * 3 % 257)
        scheduler.add(Sequence(seq_id, prompt, SamplingParams(), max_length=100_000, stop_token_ids=frozenset([1])))
    in_flight = deque([scheduler.schedule()])
    assert len(in_flight[0].chunks) == num_seqs
    sampled = [5] * num_seqs
    best = float("inf")
    for _ in range(num_repeats):
        began = time.perf_counter()
        for _ in range(num_steps):
            in_flight.append(scheduler.schedule())
            scheduler.commit(in_flight.popleft(), sampled)
        best = min(best, time.perf_counter() - began)
    assert len(scheduler.running) == num_seqs
    return best / num_steps / num_seqs * 1e6


def main() -> None:
    for num_seqs in (512, 1024):
        for block_size in (256, 64):
            cost = microseconds_per_sequence(num_seqs, block_size)
            print(f"{num_seqs} running, block size {block_size}: {cost:.2f} µs per sequence and step")


if __name__ == "__main__":
    main()
