"""The logits processors on a GPU: the kernels and the twin there against the twin on a CPU, eager and captured."""

import random
from dataclasses import fields

import pytest
import torch
from support.logits_case import Case, Request, Settings, assert_same, make_case, random_case, random_settings

from nanovllm.ops.process_logits import TokenRules, plain_process_logits, triton_process_logits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "process", [plain_process_logits, triton_process_logits], ids=["plain", "kernels"]
)


def large_case(vocab_size: int, num_rows: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """Histories of up to 3,000 tokens, some of few different ids, in a table for 5,000; a padding row at the end."""
    rng = random.Random(seed)
    requests = []
    for index in range(num_rows):
        ids = rng.choices(range(vocab_size), k=rng.choice([1, 30, 3000]))
        known = rng.choices(ids, k=rng.choice([1, 255, 256, 257, 1100, 3000]))
        num_prompt = rng.randint(0, len(known))
        settings = random_settings(rng, vocab_size, ids) if index % 4 else Settings()
        requests.append(Request(known[:num_prompt], known[num_prompt:], settings))
    logits = torch.randn(num_rows + 1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 6
    return make_case(requests, logits.to(dtype), [*range(num_rows), -1], spare=2000)


def tensors(case: Case) -> list[torch.Tensor]:
    rules = [getattr(case.rules, each.name) for each in fields(TokenRules)]
    return [case.logits, case.entries, case.lengths, case.tokens, *rules]


@IMPLEMENTATIONS
def test_a_gpu_gives_the_cpus_numbers(process, count):
    rng = random.Random(1)
    for _ in range(count(30, 30)):
        case = random_case(rng, rng.choice([1, 33, 70, 999]), num_rows=rng.randint(1, 7), max_len=rng.choice([1, 40]))
        assert_same(case.to(GPU).run(process), case.run(plain_process_logits))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [5000, 32003, 151936])
def test_a_gpu_gives_the_cpus_numbers_for_long_histories(process, vocab_size, dtype):
    case = large_case(vocab_size, 24, dtype)
    expected = case.run(plain_process_logits)
    on_gpu = case.to(GPU)
    for _ in range(3):  # races between programs would give different results
        assert_same(on_gpu.run(process), expected)


def test_a_table_of_512_rows_is_processed_as_its_rows_alone():
    """The last rows' counters and logits are beyond 2³¹ bits."""
    case = large_case(151936, 511, torch.bfloat16)
    on_gpu = case.to(GPU)
    out = on_gpu.run(triton_process_logits)
    assert out.shape == (512, 151936)
    for rows in (slice(0, 8), slice(250, 258), slice(500, 512)):
        step = (case.logits[rows], case.entries[rows], case.lengths[rows])
        assert_same(out[rows], plain_process_logits(*step, case.tokens, case.rules, 0))


@IMPLEMENTATIONS
def test_a_captured_step_reads_what_the_tensors_hold_at_its_replay(process):
    """Neither a capture nor a call waits for the GPU."""
    cases = [large_case(3001, 12, torch.bfloat16, seed) for seed in range(4)]
    static = []
    for each in zip(*map(tensors, cases), strict=True):
        widest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in each), strict=True)]
        static.append(torch.empty(widest, dtype=each[0].dtype, device=GPU))

    def fill(case: Case) -> None:
        for target, source in zip(static, tensors(case), strict=True):
            target.fill_(-1)  # in edit_ids this means no edit
            target[tuple(map(slice, source.shape))] = source.to(GPU)

    rules = TokenRules(*static[4:])
    fill(cases[0])
    process(*static[:4], rules, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        process(*static[:4], rules, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = process(*static[:4], rules, 0)
    for case in [*cases, cases[0]]:
        fill(case)
        out.fill_(float("nan"))
        graph.replay()
        assert_same(out, case.run(plain_process_logits))
