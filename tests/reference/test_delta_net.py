"""The operation of gated DeltaNet layers, plain and by its kernels, against the recurrence token by token in float64.

Triton's interpreter runs the kernels. It multiplies the bits of bfloat16 numbers as integers (tl.dot), so numbers of 16
bits are float16 here. Every case begins with states of NaN, so a state that is read by mistake shows.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from support.delta_reference import Chunk, DeltaCase, DeltaShape, make_delta_case, reference, relative

from nanovllm.ops.delta_decodes import triton_delta_decodes
from nanovllm.ops.delta_prompts import triton_delta_prompts
from nanovllm.ops.layer_state import LayerState

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

FORMS = pytest.mark.parametrize("use_kernels", [False, True], ids=["plain", "kernels"])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 9e-4}
# Heads per key head 1, 2 and 4; kernels of 2 to 5 inputs; dimensions that differ and are no powers of 2.
SHAPES = [
    DeltaShape(1, 2, 8, 16, 4), DeltaShape(2, 1, 12, 20, 2), DeltaShape(1, 4, 32, 8, 3), DeltaShape(1, 2, 24, 40, 5)
]  # fmt: skip


def assert_step(case: DeltaCase, chunks: list[Chunk], use_kernels: bool, *padding) -> None:
    before = [tensor.clone() for tensor in (*case.qkvz, *case.ba)]
    out = case.run(chunks, use_kernels, *padding)
    expected = case.expected(chunks)
    assert out.dtype == case.qkvz[0].dtype
    tolerance = TOLERANCE[case.weights.convolution.dtype]
    if out.dtype == torch.float16 and not use_kernels:  # only the results are rounded
        tolerance = 2.5e-4
    assert relative(out[: len(expected)].double().numpy(), expected) <= tolerance
    assert all(map(torch.equal, before, (*case.qkvz, *case.ba)))


@FORMS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_rows_continue_from_their_states(shape, use_kernels):
    """Decodes at position 0 and later, prompts of one token and of several tiles, chunks that continue, and a row of
    one token after longer ones, which is not a decode."""
    case = make_delta_case([3, 2, 150, 70, 2], shape)
    assert_step(case, [(0, 0, 1), (1, 0, 1), (2, 0, 100), (4, 0, 1)], use_kernels)
    case.assert_states([1, 1, 100, 0, 1], TOLERANCE[torch.float32])
    assert_step(case, [(1, 1, 1), (0, 1, 1), (2, 100, 50), (3, 0, 66), (4, 1, 1)], use_kernels)
    assert_step(case, [(0, 2, 1), (3, 66, 4)], use_kernels)
    case.assert_states([3, 2, 150, 70, 2], TOLERANCE[torch.float32])


@pytest.mark.long
@FORMS
@pytest.mark.parametrize("value_dim", [16, 40, 64])
@pytest.mark.parametrize("key_dim", [8, 48, 128])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("kernel_size", [2, 3, 4, 5])
def test_heads_of_all_shapes(kernel_size, heads, key_dim, value_dim, use_kernels):
    case = make_delta_case([66, 5], DeltaShape(*heads, key_dim, value_dim, kernel_size), seed=key_dim)
    assert_step(case, [(1, 0, 1), (0, 0, 64)], use_kernels)
    assert_step(case, [(0, 64, 1), (1, 1, 4)], use_kernels)
    assert_step(case, [(0, 65, 1)], use_kernels)
    case.assert_states([66, 5], TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("dtype", "use_kernels"), [(torch.float64, False), (torch.float16, False), (torch.float16, True)], ids=str
)
def test_results_are_as_precise_as_the_inputs(dtype, use_kernels):
    """With inputs of 16 bits, states are in float32. The plain form also computes in float64."""
    case = make_delta_case([130], DeltaShape(1, 2, 32, 16), dtype)
    if dtype == torch.float64:
        case.state = LayerState(case.state.recurrent.double(), case.state.inputs)
        weights = case.weights
        case.weights = weights._replace(a_log=weights.a_log.double(), dt_bias=weights.dt_bias.double())
    assert_step(case, [(0, 0, 70)], use_kernels)
    assert_step(case, [(0, 70, 1)], use_kernels)
    assert_step(case, [(0, 71, 59)], use_kernels)
    case.assert_states([130], TOLERANCE[dtype])


@FORMS
def test_chunks_of_a_prompt_leave_the_state_of_the_whole(use_kernels, count):
    """A chunk may end anywhere: within the convolution's reach, in a tile or at its end."""
    rng = random.Random(1)
    for run in range(count(1, 20)):
        case, position = make_delta_case([140], DeltaShape(1, 1), seed=run), 0
        while position < 140:
            num_new = min(rng.choice((1, 1, 2, 3, 30, 63, 64, 65)), 140 - position)
            assert_step(case, [(0, position, num_new)], use_kernels)
            position += num_new
            case.assert_states([position], TOLERANCE[torch.float32])


@FORMS
def test_padding_and_rows_without_tokens_touch_no_state(use_kernels):
    """Only the device knows how many rows of a captured step are decodes, or rows at all. A sibling whose tokens were
    computed by another row has none in its first step."""
    case = make_delta_case([3, 2, 66, 9], DeltaShape(1, 2))
    for before in (case.state.recurrent, case.state.inputs):
        before[3] = 7  # that of the row without tokens
    assert_step(case, [(0, 0, 1), (1, 0, 1), (2, 6, 0), (3, 0, 9)], use_kernels, (3, 5, 2))
    case.assert_states([1, 1, 0, 9], TOLERANCE[torch.float32])
    for tensor in case.state:
        assert (tensor[3] == 7).all() and tensor[[0, 5]].isnan().all()


def test_kernels_write_no_output_of_padding():
    """Another kernel may have written its rows already."""
    case = make_delta_case([3, 2, 66], DeltaShape(1, 2))
    chunks: list[Chunk] = [(0, 0, 1), (1, 0, 1), (2, 0, 66)]
    inputs, rows = case.inputs(chunks, 5), case.rows(chunks, (2, 5, 2))
    for launch, written in ((triton_delta_decodes, slice(0, 2)), (triton_delta_prompts, slice(2, 68))):
        out = torch.full((73, 16), math.nan)
        launch(*inputs, case.weights, case.state, rows, out)
        is_written = torch.zeros(73, dtype=torch.bool)
        is_written[written] = True
        assert torch.equal(~out.isnan().any(1), is_written) and out[~is_written].isnan().all()


@FORMS
def test_equal_keys_are_solved_exactly(use_kernels):
    """Powers of the system's matrix grow like binomial coefficients, and their sum would lose all digits."""
    case = make_delta_case([128], DeltaShape(1, 2, 16, 16))
    case.make_keys_equal()
    assert_step(case, [(0, 0, 128)], use_kernels)
    case.assert_states([128], TOLERANCE[torch.float32])


@FORMS
def test_slow_decays_are_not_rounded_away(use_kernels):
    """softplus of −17 is less than half a unit in the last place of 1."""
    case = make_delta_case([150], DeltaShape(1, 1))
    case.ba[0][:, 1] = 0
    case.weights.dt_bias.fill_(-17)
    case.weights.a_log.fill_(8)
    ((case.outputs[0], case.states[0]),) = [reference(case.qkvz[0], case.ba[0], case.weights, case.shape)]
    assert_step(case, [(0, 0, 148)], use_kernels)
    assert_step(case, [(0, 148, 1)], use_kernels)
    assert_step(case, [(0, 149, 1)], use_kernels)
    case.assert_states([150], TOLERANCE[torch.float32])


def test_rows_of_projections_may_be_parts_of_wider_ones():
    """One projection may compute both inputs."""
    case = make_delta_case([70, 2], DeltaShape(1, 2))
    chunks: list[Chunk] = [(1, 0, 1), (0, 0, 70)]
    qkvz, ba = case.inputs(chunks)
    wide = torch.cat([qkvz, ba], 1)
    sliced = replace(case, state=LayerState(*(tensor.clone() for tensor in case.state)))
    sliced.inputs = lambda *_: wide.split((qkvz.shape[1], ba.shape[1]), 1)
    assert torch.equal(sliced.run(chunks, True), case.run(chunks, True))
    assert all(map(torch.equal, map(torch.nan_to_num, sliced.state), map(torch.nan_to_num, case.state)))


@FORMS
@pytest.mark.parametrize("shape", [DeltaShape(2, 2, 6, 72, 3), DeltaShape(2, 3, 136, 24, 2)], ids=str)
def test_several_programs_share_a_head_and_several_heads_a_key_head(shape, use_kernels):
    """Values wider than 64, or beside keys wider than 128, are divided."""
    case = make_delta_case([4, 3], shape)
    assert_step(case, [(1, 0, 1), (0, 0, 3)], use_kernels)
    case.assert_states([3, 1], TOLERANCE[torch.float32])
    assert_step(case, [(0, 3, 1), (1, 1, 2)], use_kernels)
    case.assert_states([4, 3], TOLERANCE[torch.float32])


@FORMS
def test_short_queries_and_keys_are_not_scaled_to_length_1(use_kernels):
    """Their squares are not much more than the ε of the norm; and outputs are as small as that of their norm."""
    case = make_delta_case([3, 2], DeltaShape(1, 2))
    case.weights.convolution.mul_(1e-3)
    for i, (qkvz, ba) in enumerate(zip(case.qkvz, case.ba, strict=True)):
        case.outputs[i], case.states[i] = reference(qkvz, ba, case.weights, case.shape)
    assert_step(case, [(1, 0, 1), (0, 0, 2)], use_kernels)
    assert_step(case, [(0, 2, 1)], use_kernels)
