"""The ranks' sum, residual and norm in one kernel against its plain twin.

Ranks share GPUs if there are too few; the driver then lets them run in turn, which takes longer.
"""

import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

RANK = """
    import os
    import sys
    from dataclasses import replace
    import torch
    import torch.distributed as dist
    from nanovllm.layers.context import LayerContext
    from nanovllm.layers.forms import Form, PartialSum
    from nanovllm.layers.norm import RMSNorm
    from nanovllm.ops import exchange as kernels
    from nanovllm.ops.collectives import Parallel
    from nanovllm.ops.exchange import make_exchange
    from nanovllm.ops.quantize import ScaledProduct
    from nanovllm.ops.sampling_exchange import make_sampling_exchange

    rank, size, meeting_point = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    is_shared = size > torch.cuda.device_count()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = str(int(is_shared))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    kind = "gloo" if is_shared else "cpu:gloo,cuda:nccl"  # NCCL refuses to share
    dist.init_process_group(kind, init_method=meeting_point, rank=rank, world_size=size)
    plain = Parallel(rank, size, dist.group.WORLD)
    with torch.inference_mode():
        for dtype, width in ((torch.bfloat16, 4096), (torch.float32, 72), (torch.bfloat16, 5120), (torch.float16, 64)):
            exchange = make_exchange(plain, width, dtype, device)
            fused = replace(plain, exchange=exchange)
            twin, norm = (
                RMSNorm(width, 1e-6, LayerContext(dtype, device, True, parallel)) for parallel in (plain, fused)
            )
            for it in (twin, norm):
                it.weight.copy_(torch.linspace(0.5, 2, width))
                it.weight[:2] = -1
            generator = torch.Generator(device).manual_seed(rank)
            ways = ((rows, way) for rows in (1, 2, 3, 5, 64, 197, 531, 2051) for way in (2**20, -1))
            for num_rows, kernels._BYTES_OF_A_TRIP in ways:
                # Several in a row, as the layers of a model: a residual stays with the rank whose row it is.
                theirs = ours = None
                for _ in range(4):
                    product = torch.randn(num_rows, width, device=device, generator=generator).to(dtype)
                    product[:, :5] = -0.0
                    expected, theirs = twin.reduce_add(PartialSum(product.clone()), theirs)
                    normed, ours = norm.reduce_add(PartialSum(product), ours)
                    error = ((normed - expected).abs() / (1 + expected.abs())).max().item()
                    # The twin rounds the sum of the ranks as well.
                    allowed = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]
                    assert error <= allowed, (dtype, width, num_rows, error)
                    everybody = plain.all_gather(normed.cpu()[None])
                    assert all(torch.equal(other, normed.cpu()) for other in everybody), "the ranks differ"
            if dtype != torch.bfloat16:
                continue
            # Products in FP8, which keep their scales until they are sent, and results in FP8.
            norm = RMSNorm(width, 1e-6, LayerContext(dtype, device, True, fused), gives=Form.QUANTIZED)
            norm.weight.copy_(twin.weight)
            ways = ((rows, way) for rows in (1, 2, 3, 64, 531, 2051) for way in (2**20, -1))
            for num_rows, kernels._BYTES_OF_A_TRIP in ways:
                theirs = ours = None
                for _ in range(3):
                    product = torch.randn(num_rows, width, device=device, generator=generator).to(dtype)
                    scales = [torch.rand(n, device=device, generator=generator) + 0.5 for n in (num_rows, width)]
                    product = ScaledProduct(product, *scales)
                    expected, theirs = twin.reduce_add(PartialSum(product.whole()), theirs)
                    normed, ours = norm.reduce_add(PartialSum(product), ours)
                    error = ((normed.whole() - expected).abs() / (1 + expected.abs())).max().item()
                    assert error <= 0.17, (width, num_rows, error)  # rounding to e4m3 explains 1/16
                    assert (normed.values.float().abs().amax(1) == 448).all()
                    bits = normed.values.view(torch.uint8).cpu(), normed.scales.cpu()
                    for mine in bits:
                        assert all(torch.equal(other, mine) for other in plain.all_gather(mine[None])), "ranks differ"
        # Thousands of sums from a graph and between its replays, the ranks out of step: rank 0 has more to do.
        width = 4096
        exchange = make_exchange(plain, width, torch.bfloat16, device)
        norm = RMSNorm(
            width, 1e-6, LayerContext(torch.bfloat16, device, True, replace(plain, exchange=exchange))
        )
        norm.weight.fill_(1)
        source = torch.full((4099, width), float(rank + 1), device=device, dtype=torch.bfloat16)
        counter = torch.zeros((), device=device, dtype=torch.bfloat16)
        busy = torch.randn(2048, 2048, device=device)

        def step(num_rows):
            # The sum is size × (size + 1) / 2 × counter: constant rows, so that the norm is 1 or 0.
            counter.add_(1).remainder_(8)
            if rank == 0:
                busy @ busy
            wanted, residual = (counter > 0).to(torch.bfloat16), None
            for _ in range(3):
                normed, residual = norm.reduce_add(PartialSum(source[:num_rows] * counter), residual)
                wrong.add_((normed != wanted).sum())

        def steps(num_rounds):
            for num_rows in (97, 1, 4099, 300) * num_rounds:
                for kernels._BYTES_OF_A_TRIP in (2**20, -1):
                    step(num_rows)

        wrong = torch.zeros((), device=device, dtype=torch.int64)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which filled the tensors
        with torch.cuda.stream(stream):
            steps(1)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            steps(6)
            graph.capture_end()
            for _ in range(2 if is_shared else 60):
                graph.replay()
                steps(1)
        torch.cuda.synchronize()
        assert wrong.item() == 0, wrong
        # Columns to rows, and everybody's tokens.
        for dtype, num_columns in ((torch.bfloat16, 18992), (torch.float32, 16)):
            sampling = make_sampling_exchange(plain, 64 * size, num_columns, dtype, device)
            assert sampling.columns.shape == (64 * size, num_columns)
            for num_rows in (64 * size, size, 0, 5 * size):
                whole = torch.arange(num_rows * size * num_columns, device=device) % 251
                whole = whole.view(num_rows, size * num_columns).to(dtype)
                columns = sampling.columns[:num_rows].copy_(whole[:, rank * num_columns : (rank + 1) * num_columns])
                mine = slice(rank * num_rows // size, (rank + 1) * num_rows // size)
                assert torch.equal(sampling.rows_of_columns(columns), whole[mine])
                own = torch.arange(num_rows // size, device=device) + 1000 * rank
                gathered = sampling.all_gather(own).clone()
                expected = [1000 * r + i for r in range(size) for i in range(num_rows // size)]
                assert gathered.tolist() == expected
                plain.all_gather(torch.zeros(1))  # in place of the sums of the next step
        # Hundreds of steps, most from a graph, while rank 0 lags behind: sums, then columns and tokens that count the
        # steps.
        num_rows, num_columns = 64 * size, 1024
        sampling = make_sampling_exchange(plain, num_rows, num_columns, torch.bfloat16, device)
        wrong, count = torch.zeros((), device=device, dtype=torch.int64), torch.zeros((), device=device)
        ranks_of_columns = torch.arange(size, device=device).repeat_interleave(num_columns)

        def sampling_step():
            count.add_(1).remainder_(16)
            if rank == 0:
                busy @ busy
            residual = None
            for _ in range(2):
                normed, residual = norm.reduce_add(PartialSum(source[:7]), residual)
            rows = sampling.rows_of_columns(sampling.columns.copy_((count + 16 * rank).expand(num_rows, num_columns)))
            wrong.add_((rows != count + 16 * ranks_of_columns).sum())
            tokens = sampling.all_gather((count + 16 * rank).long().expand(64))
            expected = (count + 16 * torch.arange(size, device=device)).long().repeat_interleave(64)
            wrong.add_((tokens != expected).sum())

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sampling_step()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(8):
                sampling_step()
            graph.capture_end()
            for _ in range(2 if is_shared else 100):
                graph.replay()
                sampling_step()
        torch.cuda.synchronize()
        assert wrong.item() == 0, wrong
    print("right")
"""


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_exchange_is_the_all_reduce_and_the_norm(tmp_path, size):
    """This finds errors in the last row of an uneven division, a mailbox that is filled again before it was read, and a
    rank that waits for ever.
    """
    pytest.importorskip("triton")
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    root = str(Path(__file__).parent.parent.parent)
    command = [sys.executable, script, "rank", str(size), f"file://{tmp_path}/meeting"]
    logs = [tmp_path / f"{rank}.log" for rank in range(size)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command[2] = str(rank)
            with log.open("w") as output:
                ranks.append(subprocess.Popen(command, cwd=root, stdout=output, stderr=subprocess.STDOUT))
        # If one fails, the others would wait for it.
        handles = [os.pidfd_open(rank.pid) for rank in ranks]
        while handles and not any(rank.poll() for rank in ranks):
            ended, _, _ = select.select(handles, [], [], 200)
            assert ended, "somebody waits for ever"
            handles = [handle for handle in handles if handle not in ended]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        outputs = [log.read_text() for log in logs]
        print(*outputs, sep="\n")
    assert all(output.splitlines()[-1:] == ["right"] for output in outputs)
