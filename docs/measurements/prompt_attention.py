"""Attention of prompts on one GPU: TFLOP/s of our kernels and of other libraries.

    python docs/measurements/prompt_attention.py [--heads 128:16:8,128:32:8,64:32:8,256:8:4] [--cases 2k,16k]

Every line is checked against the plain launch of `_prefill_kernel`; a "!" marks a difference. FlashAttention 2
(`flash-attn`) and 4 (`flash-attn-4`) are measured where they are installed, and cuDNN through PyTorch where no key is
cached. Keys lie in blocks of 64 in random order; FlashAttention 2 and cuDNN get them contiguous. The line `ours` is the
kernel that the engine chooses on this GPU. The line `_prefill_kernel` is the one that it chooses on other GPUs, and for
shapes that hopper_prompts.py does not take.
"""

import argparse
import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from nanovllm.attention import triton_prompts
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.metadata import AttentionMetadata, query_tiles
from nanovllm.ops.layer_cache import LayerCache

BLOCK_SIZE = 64
PLAIN = triton_prompts.PromptLaunch(1, 32, {"num_warps": 4, "num_stages": 3}, has_descriptors=False)


def labelling_prompts() -> list[tuple[int, int]]:
    """As many prompts of `bench.py --workload classify` as fit into a step of 16,384 tokens."""
    rng = random.Random(31)
    prompts = [(rng.randint(300, 1500), 0) for _ in range(100)]
    fitting = next(number for number in range(100) if sum(new for new, _ in prompts[: number + 1]) > 16_384)
    return prompts[:fitting]


# (new tokens, cached tokens) of each sequence.
CASES = {
    "classify": labelling_prompts(), "0.5k": [(512, 0)] * 32, "2k": [(2048, 0)] * 8, "8k": [(8192, 0)] * 2,
    "16k": [(16_384, 0)], "32k": [(32_768, 0)], "1k after 15k": [(1000, 15_000)], "2k after 14k": [(2048, 14_336)],
    "8k after 24k": [(8192, 24_576)],
}  # fmt: skip


@dataclass
class Case:
    """Random queries, keys and values of some sequences; bfloat16."""

    sequences: list[tuple[int, int]]
    head_dim: int
    num_heads: int
    num_kv_heads: int
    scale: float = field(init=False)

    def __post_init__(self):
        device, dtype = torch.device("cuda"), torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        self.new = np.array([new for new, _ in self.sequences])
        self.lengths = np.array([new + cached for new, cached in self.sequences])
        self.num_tokens, self.scale = int(self.new.sum()), self.head_dim**-0.5
        heads = self.num_heads + 2 * self.num_kv_heads  # queries are a part of one product, as in the engine
        qkv = torch.randn(self.num_tokens, heads, self.head_dim, device=device, dtype=dtype, generator=generator)
        self.q = qkv[:, : self.num_heads]
        counts = -(-self.lengths // (2 * BLOCK_SIZE))  # blocks of twice the size, for libraries that need larger pages
        shape = 2 * int(counts.sum()), BLOCK_SIZE, self.num_kv_heads, self.head_dim
        self.caches = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(2)]
        blocks = torch.randperm(int(counts.sum()), generator=torch.Generator().manual_seed(0)).int()
        pairs = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, some in enumerate(blocks.split(counts.tolist())):
            pairs[row, : len(some)] = some
        singles = torch.stack([2 * pairs, 2 * pairs + 1], 2).flatten(1)
        self.tables = {BLOCK_SIZE: singles.to(device), 2 * BLOCK_SIZE: pairs.to(device)}
        zeros = torch.zeros(1, dtype=torch.int32, device=device)
        self.metadata = AttentionMetadata(
            self.offsets(self.new), torch.tensor(self.lengths, dtype=torch.int32, device=device), zeros, 0,
            int(self.new.max()), int(self.lengths.max()), torch.empty(0, device=device), self.tables[BLOCK_SIZE],
            BLOCK_SIZE, query_tiles=torch.from_numpy(query_tiles(self.new.copy(), self.lengths, 0)).to(device),
        )  # fmt: skip
        self.shape = AttentionShape(
            self.num_heads, self.num_kv_heads, self.head_dim, dtype, device, 64, int(self.lengths.max()) + 1
        )

    @property
    def operations(self) -> int:
        """Multiplications and additions that causal attention needs."""
        pairs = sum(new * cached + new * (new + 1) // 2 for new, cached in self.sequences)
        return 4 * self.num_heads * self.head_dim * pairs

    def offsets(self, lengths: np.ndarray) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")

    def contiguous(self) -> list[torch.Tensor]:
        """Keys and values as [sum of lengths, num_kv_heads, head_dim]."""
        slots = torch.cat([
            (table[:, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")).flatten()[:length]
            for table, length in zip(self.tables[BLOCK_SIZE], self.lengths.tolist(), strict=True)
        ])  # fmt: skip
        return [cache.flatten(0, 1)[slots] for cache in self.caches]


Attend = Callable[[], torch.Tensor]


def ours(case: Case) -> Attend:
    out = torch.empty_like(case.q)

    def attend() -> torch.Tensor:
        triton_prompts.attend_prompts(case.shape, case.q, LayerCache(*case.caches), out, case.metadata, 0)
        return out

    return attend


def launched(case: Case, launch: triton_prompts.PromptLaunch | None = None) -> Attend:
    """Attends by _prefill_kernel, launched as given or as for this shape."""
    out, scale = torch.empty_like(case.q), case.scale * triton_prompts.LOG2_E
    how = launch or triton_prompts.prompt_launch(case.shape, BLOCK_SIZE)

    def attend() -> torch.Tensor:
        triton_prompts.launch_prefill(how, case.q, LayerCache(*case.caches), out, case.metadata, scale, 0)
        return out

    return attend


def flash_attention_2(case: Case) -> Attend | None:
    if importlib.util.find_spec("flash_attn") is None or case.head_dim > 128:
        return None
    from flash_attn import flash_attn_varlen_func

    keys, values = case.contiguous()
    rows = case.offsets(case.new), case.offsets(case.lengths), int(case.new.max()), int(case.lengths.max())
    return lambda: flash_attn_varlen_func(case.q, keys, values, *rows, causal=True)


def flash_attention_4(case: Case, block_size: int) -> Attend | None:
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except ImportError:
        return None
    caches = [cache.view(-1, block_size, *cache.shape[2:]) for cache in case.caches]
    options = {
        "cu_seqlens_q": case.offsets(case.new), "max_seqlen_q": int(case.new.max()), "causal": True,
        "max_seqlen_k": int(case.lengths.max()), "seqused_k": case.metadata.context_lens,
        "page_table": case.tables[block_size],
    }  # fmt: skip

    def attend() -> torch.Tensor:
        result = flash_attn_varlen_func(case.q, *caches, **options)
        return result[0] if isinstance(result, tuple) else result

    return attend


def cudnn(case: Case) -> Attend | None:
    if len(set(case.sequences)) > 1 or case.sequences[0][1]:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, keys, values = (
        x.unflatten(0, (len(case.sequences), -1)).transpose(1, 2).contiguous() for x in (case.q, *case.contiguous())
    )

    def attend() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


LINES: dict[str, Callable[[Case], Attend | None]] = {
    "plain launch": lambda case: launched(case, PLAIN),
    "_prefill_kernel": launched,
    "ours": ours,
    "FlashAttention 2": flash_attention_2,
    "FlashAttention 4, 64": lambda case: flash_attention_4(case, 64),
    "FlashAttention 4, 128": lambda case: flash_attention_4(case, 128),
    "cuDNN": cudnn,
}


def best_seconds(attend: Attend) -> float:
    attend()
    seconds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # so that the host is ahead
        start.record()
        attend()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", default="128:16:8,128:32:8,64:32:8,256:8:4", help="head_dim:num_heads:num_kv_heads, several"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--lines", default=",".join(LINES))
    given = parser.parse_args()
    for heads in given.heads.split(","):
        head_dim, num_heads, num_kv_heads = map(int, heads.split(":"))
        cases = {name: Case(CASES[name], head_dim, num_heads, num_kv_heads) for name in given.cases.split(",")}
        expected = {name: launched(case, PLAIN)().float() for name, case in cases.items()}
        print(f"head_dim {head_dim}, {num_heads}/{num_kv_heads} heads".ljust(28), *(f"{name:>13}" for name in cases))
        for line in given.lines.split(","):
            cells = []
            for name, case in cases.items():
                try:
                    attend = LINES[line](case)
                    if attend is None:
                        cells.append("–")
                        continue
                    difference = (attend().reshape(expected[name].shape).float() - expected[name]).abs().max().item()
                    speed = f"{case.operations / best_seconds(attend) / 1e12:.0f}"
                    cells.append(speed if difference < 0.02 else f"!{difference:.2g} {speed}")
                except (RuntimeError, ImportError) as error:
                    cells.append("error")
                    print(f"{line}, {name}: {error!r:.200}", file=sys.stderr)
            print(line.ljust(28), *(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
