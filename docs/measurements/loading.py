"""Gigabytes per second from a checkpoint's file to the device: as the loader reads, and by several threads.

    python docs/measurements/loading.py [--gigabytes 8] [--threads 1,4,8,16] [--stage-mib 16] [--directory DIR]

A file of tensors of 64 MiB is written to the directory and read in each way twice: first from the disk, as far as the
system gives up its cache when asked, and then from memory. Threads read with `preadv` into page-locked memory, of which
one half is filled while the other is copied to the device.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BYTES_OF_TENSOR = 2**26

# What a way of reading fills, by name.
Targets = dict[str, torch.Tensor]


def by_the_loader(path: Path, targets: Targets) -> None:
    file = safe_open(path, framework="pt")
    for name, target in targets.items():
        target.copy_(file.get_slice(name)[:])


def by_threads(path: Path, targets: Targets, num_threads: int, bytes_of_stage: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    offsets = {name: found["data_offsets"][0] for name, found in json.loads(os.pread(fd, size, 8)).items()}
    own = threading.local()

    def read(name: str) -> None:
        if not hasattr(own, "halves"):
            own.halves = torch.empty(2, bytes_of_stage, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
            own.copied = [torch.cuda.Event() for _ in range(2)] if DEVICE.type == "cuda" else None
            own.stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        place = 8 + size + offsets[name]
        with torch.inference_mode(targets[name].is_inference()), torch.cuda.stream(own.stream):
            for number, target in enumerate(targets[name].view(torch.uint8).flatten().split(bytes_of_stage)):
                half = own.halves[number % 2, : len(target)]
                if own.copied is not None:
                    own.copied[number % 2].synchronize()
                view = memoryview(half.numpy())
                while view:
                    done = os.preadv(fd, [view], place)
                    view, place = view[done:], place + done
                target.copy_(half, non_blocking=True)
                if own.copied is not None:
                    own.copied[number % 2].record()

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(read, targets))
    os.close(fd)


def seconds_of(way: Callable[[Path, Targets], None], path: Path, targets: Targets, is_cold: bool) -> float:
    if is_cold:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    for target in targets.values():
        target.zero_()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    way(path, targets)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--threads", default="1,4,8,16")
    parser.add_argument("--stage-mib", type=int, default=16)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    given = parser.parse_args()
    num_tensors = max(1, round(given.gigabytes * 1e9 / BYTES_OF_TENSOR))
    ways: dict[str, Callable[[Path, Targets], None]] = {"loader": by_the_loader}
    for number in map(int, given.threads.split(",")):
        ways[f"{number} threads"] = partial(by_threads, num_threads=number, bytes_of_stage=given.stage_mib * 2**20)
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        path = Path(directory) / "model.safetensors"
        shape = (BYTES_OF_TENSOR // 8192, 4096)
        written = {str(number): torch.randn(shape).to(torch.bfloat16) for number in range(min(num_tensors, 4))}
        save_file({str(number): written[str(number % 4)].clone() for number in range(num_tensors)}, path)
        os.sync()
        targets = {
            str(number): torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for number in range(num_tensors)
        }
        for name, way in ways.items():
            rates = [path.stat().st_size / seconds_of(way, path, targets, is_cold) / 1e9 for is_cold in (True, False)]
            is_right = all(targets[key].cpu().equal(written[str(int(key) % 4)]) for key in targets)
            rates_in_words = f"{rates[0]:.1f} GB/s from the disk, {rates[1]:.1f} GB/s from memory"
            print(f"{name}: {rates_in_words}{'' if is_right else ', WRONG'}", flush=True)


if __name__ == "__main__":
    main()
