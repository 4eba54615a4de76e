"""From scheduled work to tensors: worked examples, and every step of a random run against plain loops."""

import json
import random
from contextlib import suppress
from itertools import takewhile

import pytest
import torch
from fake_runner import FakeRunner, make_engine, run_to_end

import nanovllm.runner.sequence_table
from nanovllm.runner.batch import Batch, build_batch, special_rows
from nanovllm.runner.sequence_table import DeviceState
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Work
from nanovllm.engine.sequence import Sequence
from nanovllm.models.config import load_model_config
from nanovllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
CPU = torch.device("cpu")


def scheduled(tokens, block_table, num_computed_tokens=None, num_in_flight=0, params=GREEDY, slot=0, **fields):
    """A sequence as the scheduler leaves it when its tokens up to `num_computed_tokens` are to be computed."""
    seq = Sequence(0, list(tokens), params, max_length=10_000, **fields)
    seq.block_table = block_table
    seq.num_tokens += num_in_flight
    seq.num_computed_tokens = seq.num_tokens if num_computed_tokens is None else num_computed_tokens
    seq.slot = slot
    return seq


def sampling(seq: Sequence) -> Sequence:
    seq.num_tokens += 1
    return seq


def build(work: Work, block_size: int = 256) -> Batch:
    return build_batch(work, block_size, CPU)


def test_prompts_of_three_and_four_tokens_begin_at_0_3_and_7():
    first, second = scheduled([1, 2, 3], [0], slot=4), scheduled([4, 5, 6, 7], [1], slot=2)
    batch = build([(sampling(first), 3, True), (sampling(second), 4, True)])
    context = batch.context
    assert context.cu_seqlens_q.tolist() == context.cu_seqlens_k.tolist() == [0, 3, 7]
    assert (context.max_seqlen_q, context.max_seqlen_k) == (4, 4)
    assert context.context_lens.tolist() == [3, 4]
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.sampled_rows.tolist() == [2, 6] and batch.sampled_slots.tolist() == [4, 2]
    assert batch.in_flight_slots is None


def test_a_hundred_tokens_in_block_5_of_256_go_to_slots_1280_to_1379():
    batch = build([(sampling(scheduled(range(100), [5])), 100, True)])
    assert batch.context.slot_mapping.tolist() == list(range(1280, 1380))


def test_the_block_table_maps_logical_to_physical_blocks():
    batch = build([(sampling(scheduled(range(600), [5, 12, 3])), 600, True)])
    slots = batch.context.slot_mapping.tolist()
    assert slots == [block * 256 + offset for block in (5, 12, 3) for offset in range(256)][:600]
    assert batch.context.block_tables.tolist() == [[5, 12, 3]]


def test_the_attention_of_a_chunk_ends_at_the_chunk():
    """Keys were counted to the prompt's end, where the cache still held those of another sequence."""
    chunk = scheduled(range(100, 120), [7, 2, 9], num_computed_tokens=16)
    batch = build([(chunk, 8, False), (sampling(scheduled([1, 2], [4])), 2, True)], block_size=8)
    assert batch.context.cu_seqlens_q.tolist() == [0, 8, 10]
    assert batch.context.cu_seqlens_k.tolist() == [0, 16, 18]
    assert batch.context.context_lens.tolist() == [16, 2] and batch.context.max_seqlen_k == 16
    assert batch.token_ids.tolist() == [*range(108, 116), 1, 2]
    assert batch.positions.tolist() == [*range(8, 16), 0, 1]
    assert batch.context.slot_mapping.tolist() == [*range(16, 24), 32, 33]
    assert batch.sampled_rows.tolist() == [9], "only what reaches its end samples"


def test_a_token_in_flight_is_read_from_the_slot_where_the_step_before_leaves_it():
    known = scheduled([1, 2, 3], [0], slot=0)
    unknown = scheduled([4, 5, 6], [1], num_in_flight=1, slot=3)
    batch = build([(sampling(known), 3, True), (sampling(unknown), 1, True)], block_size=4)
    assert batch.token_ids.tolist() == [1, 2, 3, 0]
    assert batch.in_flight_slots.tolist() == [-1, -1, -1, 3]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.context.slot_mapping.tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("most_blocks", [1, 2, 128])
def test_block_tables_are_as_wide_as_the_longest(most_blocks):
    long = scheduled(range(4 * most_blocks), list(range(10, 10 + most_blocks)))
    batch = build([(scheduled([1], [3]), 1, False), (long, 1, False)], block_size=4)
    assert batch.context.block_tables.tolist() == [[3] + [0] * (most_blocks - 1), long.block_table]


def test_slots_beyond_32_bits_do_not_wrap():
    block = 2**31 // 256 + 3
    batch = build([(scheduled([1, 2], [block]), 2, False)])
    assert batch.context.slot_mapping.tolist() == [block * 256, block * 256 + 1]


def test_tensors_have_the_types_that_kernels_expect():
    batch = build([(sampling(scheduled([1, 2, 3], [0], num_in_flight=1)), 4, True)])
    context = batch.context
    for tensor in (context.cu_seqlens_q, context.cu_seqlens_k, context.context_lens, context.block_tables):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (
        batch.token_ids, batch.positions, context.slot_mapping, batch.sampled_rows, batch.sampled_slots,
        batch.in_flight_slots,
    ):  # fmt: skip
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_each_sampled_row_has_its_own_settings():
    params = [
        SamplingParams(temperature=0.5, max_tokens=9),
        GREEDY,
        SamplingParams(temperature=1.5, top_k=7, min_p=0.25),
        SamplingParams(temperature=2.0, top_p=0.5),
    ]
    seqs = [scheduled([1] * (2 + i), [i], params=p, slot=5 + i, seed=2**64 - 1 - i) for i, p in enumerate(params)]
    chunk = scheduled(range(9), [9], num_computed_tokens=4, params=SamplingParams())
    work: Work = [(chunk, 4, False)] + [(sampling(seq), 1, True) for seq in seqs]
    batch = build(work, block_size=16).sampling
    assert batch.temperatures.tolist() == [0.5, 0.0, 1.5, 2.0] and batch.temperatures.dtype == torch.float32
    assert [seed % 2**64 for seed in batch.seeds.tolist()] == [2**64 - 1 - i for i in range(4)]
    assert batch.positions.tolist() == [2, 3, 4, 5], "where the sampled token will stand"
    [special] = special_rows(work, 50, CPU)
    assert special.rows.tolist() == [2, 3], "of the sampled rows"
    assert special.slots.tolist() == [7, 8]
    for name, values in vars(special.sampling).items():
        assert torch.equal(values, getattr(batch, name)[2:]), name
    assert special.top_ks.tolist() == [7, 50] and special.top_ps.tolist() == [1.0, 0.5]
    assert special.min_ps.tolist() == [0.25, 0.0]
    assert special.banned_rows.tolist() == special.banned_ids.tolist() == []


def test_stop_tokens_are_banned_until_min_tokens_have_been_generated():
    params = SamplingParams(temperature=0, min_tokens=2)
    seqs = []
    for num_generated in range(4):
        seq = scheduled([1, 2, 3], [0], params=params, stop_token_ids=frozenset([8, 9]))
        seq.token_ids += [5] * num_generated
        seq.num_tokens += num_generated
        seq.num_computed_tokens += num_generated
        seqs.append(sampling(seq))
    [special] = special_rows([(seq, 1, True) for seq in seqs], 1000, CPU)
    assert special.rows.tolist() == [0, 1]
    banned = sorted(zip(special.banned_rows.tolist(), special.banned_ids.tolist(), strict=True))
    assert banned == [(0, 8), (0, 9), (1, 8), (1, 9)]


class ComparingRunner(FakeRunner):
    """Builds the Batch of every step and compares it with the plainest loops."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # (has leading decodes, has others, those have cached keys)
        self.kinds_seen: set[tuple[bool, bool, bool]] = set()

    def launch(self, work: Work):
        block_size = self.info.kvcache_block_size
        batch = build_batch(work, block_size, CPU)
        context = batch.context
        tokens, positions, slots, in_flight, sampled, sampled_slots = [], [], [], [], [], []
        starts_q, starts_k = [0], [0]
        for seq, num_new_tokens, samples in work:
            for position in range(seq.num_computed_tokens - num_new_tokens, seq.num_computed_tokens):
                if position < len(seq.token_ids):
                    tokens.append(seq.token_ids[position])
                else:
                    in_flight.append((len(tokens), seq.slot))
                    tokens.append(0)
                positions.append(position)
                slots.append(seq.block_table[position // block_size] * block_size + position % block_size)
            starts_q.append(len(tokens))
            starts_k.append(starts_k[-1] + seq.num_computed_tokens)
            if samples:
                sampled.append(len(tokens) - 1)
                sampled_slots.append(seq.slot)
        assert batch.token_ids.tolist() == tokens and batch.positions.tolist() == positions
        assert context.slot_mapping.tolist() == slots
        assert context.cu_seqlens_q.tolist() == starts_q and context.cu_seqlens_k.tolist() == starts_k
        assert context.max_seqlen_q == max(num_new_tokens for _, num_new_tokens, _ in work)
        assert context.max_seqlen_k == max(seq.num_computed_tokens for seq, _, _ in work)
        num_decodes = len(list(takewhile(lambda one: one[1] == 1, work)))
        assert context.num_decodes == num_decodes
        assert context.has_cached_keys == any(seq.num_computed_tokens > n for seq, n, _ in work[num_decodes:])
        self.kinds_seen.add((num_decodes > 0, num_decodes < len(work), context.has_cached_keys))
        assert batch.sampled_rows.tolist() == sampled and batch.sampled_slots.tolist() == sampled_slots
        if in_flight:
            slots = enumerate(batch.in_flight_slots.tolist())
            assert [(row, slot) for row, slot in slots if slot >= 0] == in_flight
        else:
            assert batch.in_flight_slots is None
        return super().launch(work)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_every_batch_of_a_random_run_is_what_plain_loops_make(overlap):
    rng = random.Random(5)
    plain = make_engine(
        num_blocks=30, block_size=4, max_model_len=40, max_num_batched_tokens=24, max_num_seqs=8, overlap=overlap
    )
    engine = LLMEngine(plain.config, runner=ComparingRunner(plain.info, 8))
    for _ in range(60):
        prompt = [3] * rng.randint(0, 9) + [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 19)))
    assert len(run_to_end(engine)) == 60
    assert engine.runner.num_steps > 100 and engine.runner.num_chunks > 0
    assert engine.runner.kinds_seen >= {(True, False, False), (True, True, False), (True, True, True)}
    assert engine.metrics()["num_preemptions"] > 0 and engine.metrics()["num_cached_prompt_tokens"] > 0


# The device's own state


class LostError(Exception):
    """The device's, planted."""


class DeviceRunner(FakeRunner):
    """Keeps a DeviceState as a ModelRunner does, and compares each decode step's Batch with what the host would send.

    `fail_after_update` raises once where an interrupt may come: the device has the new state, but took no step.
    """

    def __init__(self, info, max_num_seqs: int, sizes: list[int]):
        super().__init__(info, max_num_seqs)
        blocks_of_longest = -(-info.max_model_len // info.kvcache_block_size)
        self.state = DeviceState(max_num_seqs, blocks_of_longest, info.kvcache_block_size, CPU)
        self.sizes = sizes
        self.fail_after_update: BaseException | None = None
        self.num_decode_steps = self.num_rows_in_flight = self.num_padding_rows = 0

    def launch(self, work: Work):
        if all(num_new_tokens == 1 and samples for _, num_new_tokens, samples in work):
            num_rows = next(size for size in self.sizes if size >= len(work))
            self.state.update(work, num_rows)
            if self.fail_after_update is not None:
                error, self.fail_after_update = self.fail_after_update, None
                raise error
            self.check(work, self.state.decode_batch(num_rows))
        else:
            self.state.forget_rows()
        slots = [seq.slot for seq, _, samples in work if samples]
        step = super().launch(work)
        self.state.last_token_ids[slots] = torch.tensor(step._token_ids, dtype=torch.int64).clamp(min=0)
        return step

    def check(self, work: Work, batch: Batch) -> None:
        num_seqs, num_rows = len(work), len(batch.token_ids)
        expected = build_batch(work, self.info.kvcache_block_size, CPU)
        if expected.in_flight_slots is not None:
            rows = expected.in_flight_slots >= 0
            tokens = [self.last_token_ids[slot] for slot in expected.in_flight_slots[rows].tolist()]
            expected.token_ids[rows] = torch.tensor(tokens)
            self.num_rows_in_flight += len(tokens)
        context, expected_context = batch.context, expected.context
        pairs = [
            (batch.token_ids, expected.token_ids, None),
            (batch.positions, expected.positions, None),
            (context.slot_mapping, expected_context.slot_mapping, -1),
            (context.context_lens, expected_context.context_lens, 0),
            (batch.sampled_slots, expected.sampled_slots, self.state.padding_slot),
            (batch.sampling.temperatures, expected.sampling.temperatures, 0),
            (batch.sampling.seeds, expected.sampling.seeds, None),
            (batch.sampling.positions, expected.sampling.positions, None),
        ]
        for ours, theirs, padding in pairs:
            assert ours.dtype == theirs.dtype and ours.shape == (num_rows,) and ours.is_contiguous()
            assert ours[:num_seqs].tolist() == theirs.tolist()
            assert padding is None or (ours[num_seqs:] == padding).all()
        assert (batch.positions >= 0).all(), "a padding row looks its angles up, too"
        assert batch.in_flight_slots is None and batch.sampled_rows is None
        assert expected.sampled_rows.tolist() == list(range(num_seqs)), "all rows sample"
        assert context.block_tables.dtype == expected_context.block_tables.dtype
        for row, (seq, _, _) in enumerate(work):
            assert context.block_tables[row, : len(seq.block_table)].tolist() == seq.block_table
        assert (context.block_tables[num_seqs:] == 0).all()
        assert context.cu_seqlens_q.dtype == torch.int32
        assert context.cu_seqlens_q.tolist() == list(range(num_rows + 1))
        assert context.num_decodes == num_rows and context.max_seqlen_q == 1
        assert context.max_seqlen_k >= expected_context.max_seqlen_k
        assert context.block_size == expected_context.block_size
        self.num_decode_steps += 1
        self.num_padding_rows += num_rows - num_seqs


def device_engine(sizes: list[int] | None = None, **options) -> LLMEngine:
    plain = make_engine(keep_log=False, **options)
    sizes = sizes or list(range(1, plain.config.max_num_seqs + 1))
    return LLMEngine(plain.config, runner=DeviceRunner(plain.info, plain.config.max_num_seqs, sizes))


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("sizes", [[1, 2, 3, 4, 5, 6], [2, 6], [6]], ids=["as it is", "padded", "one size"])
@pytest.mark.parametrize("seed", range(8))
def test_the_device_knows_of_every_decode_what_the_host_would_send(overlap, sizes, seed, runs):
    """Slots and blocks change hands, rows come and go, prompts run as decodes, and steps fail half-way."""
    num_decode_steps = num_in_flight = num_padding = num_preemptions = 0
    for run_seed in range(3 * seed * runs, 3 * (seed + 1) * runs):
        rng = random.Random(run_seed)
        block_size = rng.choice((1, 2, 4))
        engine = device_engine(
            sizes,
            num_blocks=20 // block_size + rng.randint(1, 8),
            block_size=block_size,
            max_model_len=20,
            max_num_batched_tokens=rng.choice((5, 24)),
            max_num_seqs=6,
            enable_prefix_caching=rng.random() < 0.7,
            overlap=overlap,
        )
        runner = engine.runner
        is_alike = rng.random() < 0.5  # prompts that share all their blocks, those of their completions too
        for _ in range(100):
            if rng.random() < 0.3:
                for _ in range(rng.choice((1, 1, 3, 7))):
                    prompt = [5, 6, 7] if is_alike else [rng.randrange(9) for _ in range(rng.choice((1, 1, 3, 7)))]
                    params = SamplingParams(
                        temperature=rng.choice((0.0, 0.5, 1e-300, 1e300)),
                        max_tokens=rng.randint(1, 19),
                        seed=rng.choice((0, 2**64 - 1, 2**63, rng.getrandbits(64))),
                    )
                    engine.add_request(prompt, params)
            if rng.random() < 0.02:
                error = LostError()
                runner.launch_error, runner.fail_after_update = rng.choice(((error, None), (None, error)))
            with suppress(LostError):
                engine.step()
            engine.scheduler.check_integrity()
        runner.launch_error = runner.fail_after_update = None
        run_to_end(engine)
        num_decode_steps += runner.num_decode_steps
        num_in_flight += runner.num_rows_in_flight
        num_padding += runner.num_padding_rows
        num_preemptions += engine.metrics()["num_preemptions"]
    assert num_decode_steps > 50 and num_preemptions > 0
    assert (num_in_flight > 0) == overlap and (num_padding > 0) == (len(sizes) < 6)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_that_comes_back_to_its_slot_brings_its_new_blocks(overlap, seed):
    """Twins share blocks, so one that is preempted may return at once, to the slot it left, with other blocks.

    Its list of blocks was the same object as before, so the device kept the old ones: another sequence's keys.
    """
    rng = random.Random(seed)
    engine = device_engine(
        num_blocks=rng.randint(12, 20), block_size=2, max_model_len=24, max_num_seqs=4, overlap=overlap
    )
    for _ in range(20):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=rng.randint(1, 19)))
    assert len(run_to_end(engine)) == 20
    assert engine.metrics()["num_preemptions"] > 3


def one_row(length: int, num_blocks: int = 2, **fields) -> Work:
    seq = scheduled([7] * length, list(range(3, 3 + num_blocks)), slot=1, **fields)
    return [(sampling(seq), 1, True)]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_the_batch_of_a_step_stays_when_the_state_moves_on(num_rows):
    """With one row a transposed view is contiguous as it is: its lengths grew under the step that used them."""
    state = DeviceState(4, 5, 4, CPU)
    work = one_row(5, seed=9, params=SamplingParams(temperature=0.25))
    state.update(work, num_rows)
    batch = state.decode_batch(num_rows)
    before = [t.clone() for t in (batch.positions, batch.context.context_lens, batch.sampling.positions)]
    assert [t[0].item() for t in before] == [4, 5, 5]
    state.decode_batch(num_rows)
    state.rows.fill_(77)
    for tensor, expected in zip(
        (batch.positions, batch.context.context_lens, batch.sampling.positions), before, strict=True
    ):
        assert torch.equal(tensor, expected)
    assert batch.sampled_slots.tolist() == [1, 4, 4][:num_rows] and batch.sampling.seeds[0] == 9
    assert batch.sampling.temperatures.tolist() == [0.25, 0, 0][:num_rows]


def test_a_decode_that_goes_on_sends_only_new_blocks(monkeypatch):
    """Sending the rows of every step is what the device's own state is there to save."""
    uploads = []
    upload = nanovllm.runner.sequence_table.upload
    monkeypatch.setattr(
        nanovllm.runner.sequence_table, "upload", lambda arrays, device: uploads.append(arrays) or upload(arrays, device)
    )
    state = DeviceState(4, 8, 4, CPU)
    work = [(scheduled([7] * (5 + i), [10 * i, 10 * i + 1], slot=i), 1, True) for i in range(3)]
    sent = []
    for _ in range(9):
        for seq, _, _ in work:
            seq.num_computed_tokens += 1
            seq.num_tokens = seq.num_computed_tokens + 1
            if len(seq.block_table) * 4 < seq.num_computed_tokens:
                seq.block_table.append(seq.block_table[-1] + 1)
        uploads.clear()
        state.update(work, 3)
        sent.append(sum(array.nbytes for arrays in uploads for array in arrays))
        batch = state.decode_batch(3)
        expected = build(work, block_size=4)
        assert batch.context.slot_mapping.tolist() == expected.context.slot_mapping.tolist()
    # Lengths 6, 7, 8 at first; a block is an index and a number.
    assert sent[1:] == [12, 12, 12, 0, 12, 12, 12, 0]


def test_a_slots_last_tenant_is_forgotten():
    """Two requests one after the other in one slot: blocks, token, seed and temperature are the second's."""
    state = DeviceState(4, 5, 4, CPU)
    for blocks, token, params in (([4, 2, 1], 3, SamplingParams(temperature=2.0)), ([3, 0], 8, GREEDY)):
        seq = scheduled([token] * (len(blocks) * 4), blocks, slot=2, params=params, seed=token)
        state.update([(sampling(seq), 1, True)], 1)
        batch = state.decode_batch(1)
        assert batch.token_ids.tolist() == [token] and batch.sampling.seeds.tolist() == [token]
        assert batch.context.block_tables[0, : len(blocks)].tolist() == blocks
        assert batch.context.slot_mapping.tolist() == [blocks[-1] * 4 + 3]
        assert batch.sampling.temperatures.tolist() == [params.temperature]


def test_a_token_of_qwen3_0_6b_takes_112_kib_in_bf16(tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 151645,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_config = load_model_config(tmp_path, ["Qwen3ForCausalLM"])
    token_bytes = model_config.num_kv_values_per_token * torch.bfloat16.itemsize
    assert token_bytes == 112 * 1024 and token_bytes * 4096 == 448 * 2**20
