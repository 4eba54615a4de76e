"""Rows with LoRA adapters: their slots, the keys that they share, and adapters that cannot be used.

The FakeRunner's keys show with which adapter each token was computed.
"""

import random
from types import SimpleNamespace

import pytest
from support.fake_runner import expected_completion, expected_scores, make_engine, number_of_adapter
from support.long import some

from nanovllm import LoRARequest, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import BASE, Adapter, Sequence
from nanovllm.guides import StructuredOutputs
from nanovllm.lora import one_per_row
from nanovllm.prompts import EncodedPrompt
from nanovllm.row_stream import RowStream
from nanovllm.text import Text

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def adapter(number: int) -> LoRARequest:
    """The FakeRunner's adapter of this number; a negative one does not fit."""
    return LoRARequest(f"adapter {number}", abs(number), str(number))


A, B, C, BAD = (adapter(number) for number in (1, 2, 3, -4))


def stream_of(engine, rows, adapters, raises=False):
    """rows: (prompt, parameters); adapters: as RowStream takes them."""
    source = ((EncodedPrompt(None, list(prompt)), params) for prompt, params in rows)
    stream = RowStream(
        engine, Text(None), source, list, StructuredOutputs(None, 1000, []), raises=raises, adapters=adapters
    )
    stream.merge_adapter()
    return stream


def run(engine, rows, adapters, raises=False):
    """The outputs of the rows, in order."""
    stream, outputs = stream_of(engine, rows, adapters, raises), {}
    for finished in stream.run():
        outputs.update(finished)
        engine.scheduler.check_integrity()
    return [outputs[index] for index in range(len(outputs))]


def engine_with(max_loras: int = 2, **options):
    return make_engine(enable_lora=True, max_loras=max_loras, **options)


def number_of(request) -> int:
    return 0 if request is None else number_of_adapter(request)


def check(engine, rows, adapters, outputs):
    for (prompt, params), request, output in zip(rows, adapters, outputs, strict=True):
        assert output.error is None and output.lora_request is request
        for completion in output.outputs:
            expected, reason = expected_completion(prompt, params, engine.info, adapter=number_of(request))
            assert (completion.token_ids, completion.finish_reason) == (expected, reason), request


def random_rows(rng: random.Random, num_rows: int):
    beginnings = [[rng.randrange(1000) for _ in range(20)] for _ in range(3)]
    rows = []
    for _ in range(num_rows):
        prompt = rng.choice(beginnings)[: rng.randrange(1, 21)] + [rng.randrange(1000)] * rng.randrange(3)
        params = SamplingParams(
            temperature=1, max_tokens=rng.randrange(1, 12), n=rng.choice((1, 1, 3)), ignore_eos=True,
            stop_token_ids=range(0, 1000, rng.choice((5, 1000))),
            prompt_logprobs=rng.choice((None, None, 0)),
        )  # fmt: skip
        rows.append((prompt, params))
    return rows


@pytest.mark.parametrize("seed", some(range(12), 0, 1, 2, 3))
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_every_token_of_a_row_is_computed_with_its_adapter(seed, is_mirrored):
    """Few slots, few blocks and few places: rows wait for slots, are preempted, and share beginnings."""
    rng = random.Random(seed)
    engine = engine_with(
        max_loras=rng.randrange(1, 4), num_blocks=rng.choice((24, 40)), max_num_seqs=rng.choice((3, 8)),
        max_num_batched_tokens=rng.choice((8, 64)), overlap=rng.random() < 0.5, is_mirrored=is_mirrored,
    )  # fmt: skip
    adapters = [None, *map(adapter, range(1, 6))]
    for _ in range(3):
        rows = random_rows(rng, 40)
        chosen = [rng.choice(adapters) for _ in rows]
        outputs = run(engine, rows, iter(chosen))
        check(engine, rows, chosen, outputs)
    assert engine.metrics()["num_cached_prompt_tokens"] > 0


def test_one_adapter_of_all_rows_is_merged_and_takes_no_slot():
    engine = engine_with()
    rows = [([1, 2, 3, 4, 5, index], GREEDY) for index in range(10)]
    for request in (None, A, None, B, A, A):
        check(engine, rows, [request] * 10, run(engine, rows, request))
    assert engine.runner.num_loaded == 4 and set(engine.runner.adapters) == {0}


def test_rows_of_other_adapters_share_no_keys():
    """The same prompt of five blocks: each adapter computes it once."""
    engine, prompt = engine_with(max_loras=3), list(range(1, 22))
    hits = [run(engine, [(prompt, GREEDY)], request)[0].num_cached_tokens for request in (A, None, B, A, B, None)]
    assert hits == [0, 0, 0, 20, 20, 20]
    rows = [(prompt, GREEDY)] * 4
    # Values that were merged before have the same version in a slot.
    assert [output.num_cached_tokens for output in run(engine, rows, iter([A, B, C, None]))] == [20, 20, 0, 20]


def test_a_hash_that_confuses_adapters_gives_no_wrong_hit():
    blocks = BlockManager(16, 4, block_hash=lambda parent, tokens: 7 if parent < 10 else parent + 1)
    for version, num_cached in ((1, 0), (2, 0), (2, 4), (0, 0)):
        seq = Sequence(version, [1, 2, 3, 4, 5], GREEDY, 16, adapter=Adapter(version))
        blocks.allocate(seq)
        assert seq.num_computed_tokens == num_cached
        seq.num_computed_tokens = 5
        blocks.register_full_blocks(seq)
        blocks.deallocate(seq)


def test_contexts_of_other_adapters_are_not_forked():
    engine, context = engine_with(), list(range(1, 12))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    rows, chosen = [([*context, 50 + index], params) for index in range(4)], [A, B, A, B]
    source = ((EncodedPrompt(None, prompt, None, 11), params) for prompt, params in rows)
    stream = RowStream(engine, Text(None), source, list, StructuredOutputs(None, 1000, []), adapters=iter(chosen))
    stream.merge_adapter()
    found = {}
    numbers = engine_numbers(engine, found)
    for _ in stream.run():
        pass
    for (prompt, _), request, number in zip(rows, chosen, sorted(numbers), strict=True):
        assert numbers[number] == expected_scores(prompt, 11, engine.info, number_of(request))


def engine_numbers(engine, found):
    """Keeps the scores of the sequences that finish, by id."""
    step = engine.step

    def kept():
        finished = step()
        found.update({seq.seq_id: bytes(seq.prompt_logprobs) for seq in finished})
        return finished

    engine.step = kept
    return found


def test_a_new_value_of_an_adapter_shares_no_keys_with_the_old_one():
    engine, prompt = engine_with(), list(range(1, 22))
    for number in (1, 7, 1):
        request = LoRARequest("policy", 1, tensors={"number": number}, config={})
        output = run(engine, [(prompt, GREEDY)], request)[0]
        assert output.num_cached_tokens == 0
        assert output.token_ids == expected_completion(prompt, GREEDY, engine.info, adapter=number)[0]


def test_requests_that_are_added_by_hand_have_the_models_own_weights():
    engine, prompt = engine_with(), list(range(1, 22))
    run(engine, [(prompt, GREEDY)], A)
    seq_id = engine.add_request(prompt, GREEDY)
    with pytest.raises(RuntimeError, match="the weights hold another adapter"):
        engine.add_request(prompt, GREEDY, adapter=Adapter(1))
    finished = {}
    while not engine.is_finished():
        finished.update((seq.seq_id, seq) for seq in engine.step())
    assert finished[seq_id].completion_token_ids == expected_completion(prompt, GREEDY, engine.info)[0]


def test_ids_that_are_used_again_in_an_iterator_never_give_another_adapter():
    engine = engine_with(max_loras=1)
    rows = [([index, 2], GREEDY) for index in range(12)]
    chosen = [LoRARequest("m", 5, tensors={"number": 1 + index % 3}, config={}) for index in range(12)]
    outputs = run(engine, rows, iter(chosen))
    good = [index for index, output in enumerate(outputs) if output.error is None]
    check(engine, [rows[i] for i in good], [chosen[i] for i in good], [outputs[i] for i in good])


def test_a_row_waits_for_a_slot_and_no_row_is_lost():
    engine = engine_with(max_loras=1, max_num_seqs=4)
    rows = [([index, index + 1], GREEDY) for index in range(1, 31)]
    chosen = [adapter(1 + index % 3) for index in range(30)]
    check(engine, rows, chosen, run(engine, rows, iter(chosen)))
    assert engine.runner.num_loaded >= 30  # they come in turns, so each waits for the one before


def test_the_least_recently_used_slot_is_taken():
    engine = engine_with(max_loras=2)
    for request, num_loaded in ((A, 1), (B, 2), (A, 2), (C, 3), (A, 3), (B, 4)):
        run(engine, [([1, 2], GREEDY)] * 2, iter([request, None]))
        assert engine.runner.num_loaded == num_loaded


def test_an_adapter_that_does_not_fit_makes_its_rows_error_rows(caplog):
    engine = engine_with()
    rows = [([index, 2], GREEDY) for index in range(1, 9)]
    chosen = [A, BAD, None, BAD, B, A, BAD, None]
    set_adapter, asked = engine.runner.set_adapter, []
    engine.runner.set_adapter = lambda slot, request: asked.append(request) or set_adapter(slot, request)
    outputs = run(engine, rows, iter(chosen))
    assert asked.count(BAD) == 1, "its files are read once per call"
    assert [output.error for output in outputs if output.lora_request is BAD] == [
        "adapter 'adapter -4' does not fit"
    ] * 3
    good = [index for index, request in enumerate(chosen) if request is not BAD]
    check(engine, [rows[i] for i in good], [chosen[i] for i in good], [outputs[i] for i in good])


def test_one_adapter_that_does_not_fit_ends_the_call_and_leaves_the_weights():
    engine, rows = engine_with(), [([1, 2], GREEDY)]
    run(engine, rows, A)
    with pytest.raises(ValueError, match="does not fit"):
        run(engine, rows, BAD)
    check(engine, rows, [A], run(engine, rows, A))
    assert engine.runner.num_loaded == 1


def test_weights_in_fp8_take_no_adapter():
    engine = engine_with()
    engine._adapters._may_merge = False
    rows = [([1, 2], GREEDY)] * 3
    check(engine, rows, [A] * 3, run(engine, rows, A))
    assert engine.runner.adapters == {1: 1}
    check(engine, rows, [None] * 3, run(engine, rows, None))
    with pytest.raises(ValueError, match="does not fit"):
        run(engine, rows, BAD)


def test_a_merge_that_was_cut_off_is_done_again():
    engine, rows, set_adapter = engine_with(), [([1, 2], GREEDY)], None
    set_adapter = engine.runner.set_adapter

    def cut_off(slot, request):
        set_adapter(slot, request)
        raise KeyboardInterrupt

    engine.runner.set_adapter = cut_off
    with pytest.raises(KeyboardInterrupt):
        run(engine, rows, A)
    engine.runner.set_adapter = set_adapter
    check(engine, rows, [None], run(engine, rows, None))


def test_iterators_give_an_adapter_per_row_and_must_not_end_early():
    engine = engine_with()
    with pytest.raises(ValueError, match="lora_request ended after 1 rows"):
        run(engine, [([1], GREEDY)] * 2, iter([A]))


def test_rows_that_are_held_for_a_slot_are_dropped_by_a_drain():
    engine = engine_with(max_loras=1, max_num_seqs=2)
    rows = [([index, 2], GREEDY) for index in range(6)]
    stream = stream_of(engine, rows, iter([A, A, B, B, A, A]))
    steps, outputs = stream.run(), {}
    outputs.update(next(steps))
    dropped = stream.drain()
    for finished in steps:
        outputs.update(finished)
    assert dropped == {2, 3, 4, 5} and set(outputs) == {0, 1}


def test_only_an_idle_engine_merges_and_updates_end_a_merge():
    engine = engine_with()
    run(engine, [([1, 2], GREEDY)], A)
    engine.runner.update_weights = lambda weights: None
    engine.update_weights([])
    assert engine.runner.adapters == {0: 0}
    engine.add_request([1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError, match="have not finished"):
        engine.merge_adapter(A)


def test_a_digest_never_changes_the_weights():
    engine = engine_with()
    engine.runner.weight_digests = lambda: {"number": str(engine.runner.adapters[0])}
    run(engine, [([1, 2], GREEDY)], A)
    with pytest.raises(RuntimeError, match="an adapter is merged"):
        engine.weight_digests()
    assert engine.runner.adapters == {0: 1}
    engine.merge_adapter(None)
    assert engine.weight_digests() == {"number": "0"}


class Changing(LoRARequest):
    """An adapter whose files change each time that they are looked at."""

    def fingerprint(self):
        times = vars(self).setdefault("times", [])
        times.append(0)
        return len(times)


def test_values_that_change_during_a_call_are_not_taken_for_those_of_before():
    engine = engine_with()
    request = Changing("changing", 1, tensors={"number": 5}, config={})
    with pytest.raises(ValueError, match="adapter 'changing' changed during the call"):
        run(engine, [([1, 2], GREEDY)], request)
    outputs = run(engine, [([1, 2], GREEDY)] * 2, iter([request, None]))
    assert "changed during the call" in outputs[0].error and outputs[1].error is None
    check(engine, [([1, 2], GREEDY)], [None], run(engine, [([1, 2], GREEDY)], None))
    check(engine, [([1, 2], GREEDY)] * 2, [A, None], run(engine, [([1, 2], GREEDY)] * 2, iter([A, None])))


def test_an_adapter_that_does_not_fit_takes_no_slot():
    engine = engine_with(max_loras=1)
    rows = [([1, 2], GREEDY)] * 2
    run(engine, rows, iter([A, None]))
    assert run(engine, rows, iter([BAD, None]))[0].error is not None
    run(engine, rows, iter([A, None]))
    assert engine.runner.num_loaded == 1


def test_an_adapter_of_the_wrong_type_is_an_error_of_its_rows():
    engine, rows = engine_with(), [([1, 2], GREEDY)] * 2
    wrong = LoRARequest("wrong", 9, tensors={"number": "text"}, config={})
    outputs = run(engine, rows, iter([wrong, None]))
    assert "not supported" in outputs[0].error and outputs[1].error is None
    with pytest.raises(TypeError):
        run(engine, rows, wrong)
    check(engine, rows, [None] * 2, run(engine, rows, None))


def test_completions_of_a_request_have_its_adapter():
    engine = engine_with()
    engine.add_request([1, 2, 3], SamplingParams(n=3), adapter=Adapter(5, 2))
    assert {seq.adapter for seq in engine._unfinished.values()} == {Adapter(5, 2)} != {BASE}


@pytest.mark.parametrize(
    "given, message",
    [
        ("adapter", "must be a LoRARequest, or a list"),
        (SimpleNamespace(lora_name="a"), "must be a LoRARequest"),
        ([A], "1 lora_requests for 2 prompts"),
        ([A, "b"], "must be a LoRARequest or None, not 'b'"),
        ([A, adapter(-1)], "two adapters have the lora_int_id 1"),
    ],
)
def test_a_wrong_lora_request_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        one_per_row(given, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("", 1, "x"), "lora_name must be a name"),
        (("a", True, "x"), "lora_int_id must be an integer"),
        (("a", 0, "x"), "lora_int_id must be at least 1"),
        (("a", 1), "needs either a lora_path or tensors"),
    ],
)
def test_a_wrong_adapter_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LoRARequest(*arguments)
