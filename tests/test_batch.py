"""From scheduled work to tensors: worked examples, and every step of a random run against plain loops."""

import json
import random

import pytest
import torch
from fake_runner import FakeRunner, make_engine, run_to_end

from nanovllm.engine.batch import Batch, build_batch
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


def build(work: Work, block_size: int = 256, vocab_size: int = 1000) -> Batch:
    return build_batch(work, block_size, vocab_size, CPU)


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
    assert batch.in_flight_rows is None and batch.in_flight_slots is None


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
    assert batch.in_flight_rows.tolist() == [3] and batch.in_flight_slots.tolist() == [3]
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
        batch.in_flight_rows, batch.in_flight_slots,
    ):  # fmt: skip
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_a_greedy_batch_carries_nothing_for_sampling():
    batch = build([(sampling(scheduled([1, 2, 3], [0])), 3, True)])
    assert all(value is None for value in vars(batch.sampling).values())


def test_each_sampled_row_has_its_own_settings():
    params = [
        SamplingParams(temperature=0.5, max_tokens=9),
        GREEDY,
        SamplingParams(temperature=1.5, top_k=7, min_p=0.25),
        SamplingParams(temperature=2.0, top_p=0.5),
    ]
    seqs = [scheduled([1] * (2 + i), [i], params=p, seed=2**64 - 1 - i) for i, p in enumerate(params)]
    chunk = scheduled(range(9), [9], num_computed_tokens=4, params=SamplingParams())
    work: Work = [(chunk, 4, False)] + [(sampling(seq), 1, True) for seq in seqs]
    batch = build(work, block_size=16, vocab_size=50).sampling
    assert batch.random_rows.tolist() == [0, 2, 3]
    assert batch.temperatures.tolist() == [0.5, 1.5, 2.0]
    assert [seed % 2**64 for seed in batch.seeds.tolist()] == [2**64 - 1, 2**64 - 3, 2**64 - 4]
    assert batch.positions.tolist() == [2, 4, 5], "where the sampled token will stand"
    assert batch.filtered.tolist() == [1, 2]
    assert batch.top_ks.tolist() == [7, 50] and batch.top_ps.tolist() == [1.0, 0.5]
    assert batch.min_ps.tolist() == [0.25, 0.0]
    assert batch.banned_rows is None


def test_stop_tokens_are_banned_until_min_tokens_have_been_generated():
    params = SamplingParams(temperature=0, min_tokens=2)
    seqs = []
    for num_generated in range(4):
        seq = scheduled([1, 2, 3], [0], params=params, stop_token_ids=frozenset([8, 9]))
        seq.token_ids += [5] * num_generated
        seq.num_tokens += num_generated
        seq.num_computed_tokens += num_generated
        seqs.append(sampling(seq))
    batch = build([(seq, 1, True) for seq in seqs]).sampling
    banned = sorted(zip(batch.banned_rows.tolist(), batch.banned_ids.tolist(), strict=True))
    assert banned == [(0, 8), (0, 9), (1, 8), (1, 9)]


class ComparingRunner(FakeRunner):
    """Builds the Batch of every step and compares it with the plainest loops."""

    def launch(self, work: Work):
        block_size = self.info.kvcache_block_size
        batch = build_batch(work, block_size, self.info.vocab_size, CPU)
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
        assert batch.sampled_rows.tolist() == sampled and batch.sampled_slots.tolist() == sampled_slots
        if in_flight:
            assert list(zip(batch.in_flight_rows.tolist(), batch.in_flight_slots.tolist(), strict=True)) == in_flight
        else:
            assert batch.in_flight_rows is None
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
    assert engine.metrics()["num_preemptions"] > 0 and engine.metrics()["num_cached_prompt_tokens"] > 0


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
