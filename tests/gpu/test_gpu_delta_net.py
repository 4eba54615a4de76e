"""The kernels of gated DeltaNet layers on a GPU, against the plain form in float64, which
tests/reference/test_delta_net.py compares with the recurrence."""

import pytest
import torch
import torch.nn.functional as F
from support.delta_reference import Chunk, DeltaCase, DeltaShape, make_delta_case
from support.gpu_kernels import GPU, captured

from nanovllm.ops.delta_net import delta_net
from nanovllm.ops.layer_state import LayerState

pytestmark = pytest.mark.gpu

QWEN = DeltaShape(16, 2, 128, 128, 4)
STEPS: list[list[Chunk]] = [
    [(0, 0, 1), (1, 0, 1), (2, 0, 600), (3, 0, 64), (4, 0, 65), (5, 0, 3)],
    [(0, 1, 1), (1, 1, 1), (3, 64, 1), (2, 600, 100), (4, 65, 35), (5, 3, 0)],
    [(0, 2, 1), (4, 100, 1), (2, 700, 1), (5, 3, 1)],
]
LENGTHS = [3, 2, 701, 65, 101, 4]


def clone(state: LayerState) -> LayerState:
    return LayerState(*(tensor.clone() for tensor in state))


def in_float64(case: DeltaCase) -> DeltaCase:
    """The same numbers in float64."""
    *tensors, eps = case.weights
    return DeltaCase(
        case.shape,
        [x.double() for x in case.qkvz],
        [x.double() for x in case.ba],
        type(case.weights)(*(tensor.double() for tensor in tensors), eps),
        LayerState(*(tensor.double() for tensor in case.state)),
        [],
        [],
    )


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def of_transformers(case: DeltaCase, sequence: int, rule_name: str) -> torch.Tensor:
    """All tokens of a sequence as transformers' layer computes them: [num_tokens, num_v_heads × value_dim]."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    shape, qkvz, weights = case.shape, case.qkvz[sequence], case.weights
    inputs, z = qkvz.split((shape.num_channels, shape.num_v_heads * shape.value_dim), 1)
    width = shape.num_key_heads * shape.key_dim
    convolved = F.conv1d(
        inputs.t()[None], weights.convolution[:, None], padding=shape.kernel_size - 1, groups=shape.num_channels
    )
    channels = F.silu(convolved[:, :, : len(inputs)]).transpose(1, 2)
    q, k, v = channels.split((width, width, shape.num_v_heads * shape.value_dim), -1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in ((q, shape.key_dim), (k, shape.key_dim), (v, shape.value_dim)))
    q, k = (x.repeat_interleave(shape.heads_per_key, 2) for x in (q, k))  # older transformers do not
    b, a = case.ba[sequence][None].chunk(2, -1)
    g = -weights.a_log.exp() * F.softplus(a.float() + weights.dt_bias)
    options = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, _ = getattr(qwen, rule_name)(q, k, v, g=g, beta=b.sigmoid(), **options)
    norm = qwen.Qwen3_5RMSNormGated(shape.value_dim, eps=weights.eps).to(GPU)
    norm.weight.data = weights.norm
    heads = out[0].reshape(-1, shape.value_dim), z.reshape(-1, shape.value_dim)
    return norm(*heads).detach().view(len(qkvz), -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_not_larger_than_that_of_transformers(dtype):
    """Prompts are compared with the chunked form of transformers, decodes with the recurrent one."""
    case = make_delta_case(LENGTHS, QWEN, dtype, has_reference=False).on(GPU)
    exact = in_float64(case)
    rules = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    theirs = [[of_transformers(case, row, rule) for row in range(len(LENGTHS))] for rule in rules]
    for chunks in STEPS:
        out, expected = case.run(chunks, True), exact.run(chunks, False)
        first = 0
        for row, start, num_new in chunks:
            if num_new:
                part = slice(first, first + num_new)
                peer = theirs[num_new == 1][row][start : start + num_new]
                assert error_of(out[part], expected[part]) <= 1.1 * error_of(peer, expected[part]), (row, start)
            first += num_new
        for row, *_ in chunks:
            assert error_of(case.state.recurrent[row + 1], exact.state.recurrent[row + 1]) < 0.01
            used = min(case.shape.kernel_size, max(start + new for each, start, new in chunks if each == row))
            assert torch.equal(case.state.inputs[row + 1, :used], exact.state.inputs[row + 1, :used].to(dtype))


def test_equal_keys_are_not_less_exact_than_in_transformers():
    """Tensor cores cut off the last bits of float32 numbers. Sums with cancellation then had errors of 1.6 times those
    of transformers."""
    case = make_delta_case([300], QWEN, torch.bfloat16, has_reference=False)
    case.make_keys_equal()
    case = case.on(GPU)
    expected = in_float64(case).run([(0, 0, 300)], False)
    theirs = of_transformers(case, 0, "torch_chunk_gated_delta_rule")
    assert error_of(case.run([(0, 0, 300)], True), expected) <= 1.1 * error_of(theirs, expected)


@pytest.mark.parametrize(
    "shape",
    [QWEN, DeltaShape(2, 1, 64, 64, 4), DeltaShape(1, 3, 96, 40, 3), DeltaShape(1, 4, 16, 8, 2),
     DeltaShape(1, 2, 256, 256, 5)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=str)
def test_heads_of_all_shapes(shape, dtype, tolerance):
    case = make_delta_case(LENGTHS, shape, dtype, has_reference=False).on(GPU)
    exact = in_float64(case)
    for chunks in STEPS:
        out, expected = case.run(chunks, True, (2, 5, 1)), exact.run(chunks, False)
        assert error_of(out[: len(expected)], expected) <= tolerance
        for row, *_ in chunks:
            assert error_of(case.state.recurrent[row + 1], exact.state.recurrent[row + 1]) <= tolerance
    assert case.state.recurrent[[0, -1]].isnan().all() and case.state.inputs[[0, -1]].isnan().all()


def test_captured_steps_do_what_eager_ones_do():
    """The graph reads counts, rows and tiles when it is replayed; here it is replayed with other rows."""
    case = make_delta_case(LENGTHS, QWEN, torch.bfloat16, has_reference=False).on(GPU)
    padding = (10 - len(STEPS[1]), 10, 20 - len(case.rows(STEPS[1]).tiles))
    rows, inputs = case.rows(STEPS[1], padding), case.inputs(STEPS[1], padding[1])
    for chunks in STEPS[:1]:
        case.run(chunks, True)
    state = clone(case.state)
    # The capture runs once with padding alone.
    idle = rows._replace(**{name: value.clone() for name, value in rows._asdict().items() if torch.is_tensor(value)})
    for tensor in (idle.cu_seqlens, idle.context_lens, idle.num_decodes, idle.tiles):
        tensor.zero_()
    graph, out = captured(lambda: delta_net(*inputs, case.weights, state, idle, True))
    assert all(map(torch.equal, map(torch.nan_to_num, state), map(torch.nan_to_num, case.state)))
    for held, new in zip(idle, rows, strict=True):
        if isinstance(held, torch.Tensor):
            held.copy_(new)
    graph.replay()
    expected = case.run(STEPS[1], True)
    assert torch.equal(out[: len(expected)], expected)
    assert all(map(torch.equal, map(torch.nan_to_num, state), map(torch.nan_to_num, case.state)))


def test_states_beyond_2_to_the_31_numbers_are_reached():
    """An offset of 32 bits would wrap around."""
    num_states = 2**31 // (32 * 128 * 128) + 2
    if torch.cuda.mem_get_info()[0] < 4.5 * num_states * 32 * 128 * 128:
        pytest.skip("too little memory")
    case = make_delta_case([70, 2], QWEN, torch.bfloat16, has_reference=False).on(GPU)
    chunks: list[Chunk] = [(1, 0, 1), (0, 0, 70)]
    recurrent = torch.zeros((num_states, 32, 128, 128), device=GPU)
    inputs = torch.zeros((num_states, 4, case.shape.num_channels), dtype=torch.bfloat16, device=GPU)
    rows = case.rows(chunks)
    far = rows._replace(entries=torch.tensor([num_states - 1, num_states - 2], dtype=torch.int32, device=GPU))
    out = delta_net(*case.inputs(chunks), case.weights, LayerState(recurrent, inputs), far, True)
    assert torch.equal(out, case.run(chunks, True))
    assert torch.equal(recurrent[[-2, -1]], case.state.recurrent[1:3])
    assert not recurrent[:-2].any()
