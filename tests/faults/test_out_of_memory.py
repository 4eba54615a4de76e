"""Memory that runs out in a step: the step runs again in two halves, and all results are those of a run with enough
memory. A CPU has no such error, so it is raised where a GPU would raise it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_runner import (
    add_pooled,
    expected_completion,
    expected_scores,
    expected_states,
    make_engine,
    run_to_end,
)
from support.family_factory import FAMILIES, save_family_model
from support.interrupts import assert_empty
from support.long import long
from support.model_factory import save_model
from support.steps import scheduled

from nanovllm import LLM, PoolingParams, RequestOutput, SamplingParams
from nanovllm.engine.runner import RunnerInfo, StepTooLargeError
from nanovllm.engine.sequence import Pooling, Sequence
from nanovllm.engine.step import Chunk, Scored, Step, halves
from nanovllm.runner.sequence_table import SequenceTable
from nanovllm.runner.step_program import StepProgram

OPTIONS: dict[str, Any] = {
    "device": "cpu", "kvcache_block_size": 4, "max_model_len": 96, "max_num_seqs": 12, "num_kvcache_blocks": 120,
    "max_num_batched_tokens": 48, "cache_canary": True,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "logprobs": 2}, {"temperature": 0.8, "n": 3, "frequency_penalty": 0.7},
    {"temperature": 0.0, "prompt_logprobs": 1}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
]  # fmt: skip
POOLED = [
    PoolingParams(), PoolingParams(pooling="mean"), PoolingParams("token_embed"),
    PoolingParams(hidden_states_layers=[1]), PoolingParams("label", labels=((1,), (2, 3))),
]  # fmt: skip


class Short:
    """Memory is too short for steps of more than `num_tokens` tokens. It runs out once a part of the step is done.

    where: a method of StepProgram or SequenceTable.
    num_calls: how often it ran out.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, num_tokens: int):
        self.num_calls, self._size = 0, 0
        send, owner = SequenceTable.send, SequenceTable if hasattr(SequenceTable, where) else StepProgram
        method = send if where == "send" else getattr(owner, where)

        def noted(table: SequenceTable, step: Step, sizes: Any) -> Any:
            self._size = step.num_tokens
            return send(table, step, sizes)

        def short(*arguments: Any) -> Any:
            result = (noted if where == "send" else method)(*arguments)
            if self._size > num_tokens:
                self.num_calls += 1
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            return result

        monkeypatch.setattr(SequenceTable, "send", noted)
        monkeypatch.setattr(owner, where, short)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, seed=6)
    return str(directory)


def rows() -> list[tuple[list[int], Any]]:
    beginning = [(3 * i + 1) % 50 for i in range(9)]
    generated = [
        ([*beginning, *range(row, 2 * row + 2)], SamplingParams(**kind, max_tokens=9 + row, ignore_eos=True, seed=row))
        for row, kind in enumerate([*KINDS, *KINDS])
    ]
    return [*generated, *(([*beginning[:5], row, row, 7, 8], kind) for row, kind in enumerate(POOLED))]


def run(llm: LLM) -> list[Any]:
    llm.engine.reset()
    prompts, params = zip(*rows(), strict=True)
    outputs = [*llm.generate_iter(iter(prompts), iter(params))]
    return outputs + llm.loglikelihood([[1, 2, 3, 4, 5]] * 3, [[6], [7, 8], [9, 9, 9]], use_tqdm=False)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None and theirs.error is None
        numbers = [[getattr(each, "data", getattr(each, "logprobs", None))] for each in (ours, theirs)]
        if isinstance(ours, RequestOutput):
            assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
            numbers = [[*(one.logprobs for one in each.outputs), each.prompt_logprobs] for each in (ours, theirs)]
            assert [each is None for each in numbers[0]] == [each is None for each in numbers[1]]
            numbers = [[one.logprobs for one in each if one is not None] for each in numbers]
        for our, their in zip(*numbers, strict=True):
            np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
@pytest.mark.parametrize(
    ("where", "num_tokens"),
    [
        ("_sample", 34),
        ("_forward", 34),
        long("_send_lines", 34),
        ("send", 34),
        ("_score", 34),
        long("_copy_states", 34),
    ],
)
def test_a_step_that_ran_out_of_memory_gives_the_same_results_in_halves(
    directory, monkeypatch, caplog, where, num_tokens, overlap
):
    """It runs out before the layers, in them, after them and after the draw: all that was written is written again."""
    with LLM(directory, overlap=overlap, **OPTIONS) as llm:
        expected = run(llm)
        with monkeypatch.context() as patch:
            short = Short(patch, where, num_tokens)
            found = run(llm)
        assert_same(found, expected)
        assert short.num_calls >= 1
        llm.engine.scheduler.check_integrity()
    warnings = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert len(warnings) == 1, "once per LLM"
    assert "it runs again in two halves" in warnings[0] and "lower max_num_batched_tokens" in warnings[0]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_a_second_failure_is_an_error_that_says_what_to_lower_and_the_llm_stays_usable(directory, monkeypatch, overlap):
    with LLM(directory, overlap=overlap, **OPTIONS) as llm:
        expected = run(llm)
        with monkeypatch.context() as patch:
            short = Short(patch, "_forward", 8)
            with pytest.raises(
                RuntimeError, match=r"^a step of \d+ tokens does not fit into the memory; lower max_num_b"
            ):
                run(llm)
        assert short.num_calls in (2, 3)
        assert_empty(llm.engine)
        assert_same(run(llm), expected)


def test_a_step_of_one_token_runs_again_whole(directory, monkeypatch, caplog):
    """The freed memory may be enough."""
    real, failures = StepProgram._forward, []

    def fails_once(*arguments: Any) -> Any:
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return real(*arguments)

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(directory, **OPTIONS) as llm:
        expected = llm.generate([[1]], params, use_tqdm=False)[0].token_ids
        monkeypatch.setattr(StepProgram, "_forward", fails_once)
        llm.reset_prefix_cache()
        assert llm.generate([[1]], params, use_tqdm=False)[0].token_ids == expected
    assert failures and "it runs again, which is slower" in caplog.text


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_prompt_alone_is_computed_in_halves_of_its_tokens(family, directory, tmp_path, monkeypatch):
    """It samples, forks, is scored or pools after the second one. Only a mean is computed as a whole."""
    if family == "gemma3":
        options = FAMILIES["gemma3"][2](random.Random(3)) | {"vocab_size": 61, "num_hidden_layers": 3}
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        save_family_model(tmp_path, "gemma3", options | {"sliding_window": 5, "layer_types": kinds})
        directory = str(tmp_path)
    prompt, pooled = [7 * i % 50 for i in range(41)], [*POOLED[:1], *POOLED[2:], PoolingParams(pooling="cls")]
    params = [SamplingParams(**kind, max_tokens=5, ignore_eos=True, seed=3) for kind in KINDS] + pooled
    with LLM(directory, **OPTIONS) as llm:

        def run_each() -> list[Any]:
            outputs = []
            for each in params:
                llm.engine.reset()
                outputs += llm.generate_iter([prompt], each)
            return outputs

        expected = run_each()
        with monkeypatch.context() as patch:
            short = Short(patch, "_forward_rows", 24), Short(patch, "_forward_and_pool", 24)
            assert_same(run_each(), expected)
        assert sum(each.num_calls for each in short) >= len(params)
        llm.engine.scheduler.check_integrity()


def test_a_model_with_states_does_not_try_again(tmp_path, monkeypatch):
    """Its layers may have changed the states already, and a state can take a token only once."""
    options = FAMILIES["qwen3_5"][2](random.Random(3)) | {"num_hidden_layers": 2, "vocab_size": 61}
    save_family_model(tmp_path, "qwen3_5", options | {"layer_types": ["linear_attention", "full_attention"]})
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        expected = [output.token_ids for output in llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)]
        with monkeypatch.context() as patch:
            Short(patch, "_forward", 1)
            with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 2 GiB"):
                llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
        assert [output.token_ids for output in llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)] == expected


# The halves themselves


def random_step(rng: random.Random) -> Step:
    chunks, scored = [], []
    for row in range(rng.randint(1, 9)):
        is_fork = bool(chunks) and chunks[-1].samples and rng.random() < 0.3
        num_new = 0 if is_fork else rng.choice([1, 1, 2, 5, 9])
        pooling = rng.choice([None, None, None, Pooling("all"), Pooling("last")]) if not is_fork else None
        seq = scheduled(range(12), [row], 12, entry=row, seq_id=row, pooling=pooling)
        chunks.append(Chunk(seq, num_new, is_fork or rng.random() < 0.6))
        if pooling is not None or (num_new > 1 and rng.random() < 0.4):
            scored.append(Scored(seq, 12 - num_new + 1, 13 - rng.randint(0, 1), False))
    return Step.of(chunks, [(1, 2)], scored=scored)


def numbers_of(step: Step) -> list[Any]:
    """What a step computes, in its order: whose tokens it samples, and which tokens it scores or pools, by kind."""
    tokens: dict[Any, list[int]] = {}
    for seq, start, end, _ in step.scored:
        tokens.setdefault(seq.pooling, []).extend(100 * seq.seq_id + position for position in range(start, end))
    return [[chunk.seq.seq_id for chunk in step.chunks if chunk.samples], tokens]


def test_halves_have_all_of_a_step_once_and_in_its_order(count):
    rng, num_divided = random.Random(0), 0
    for _ in range(count(300, 20_000)):
        step = random_step(rng)
        parts = halves(step)
        if parts is None:
            assert step.num_tokens == 1
            continue
        first, second = parts
        assert first.num_tokens + second.num_tokens == step.num_tokens
        assert abs(first.num_tokens - second.num_tokens) <= max(chunk.num_new_tokens for chunk in step.chunks)
        if step.chunks[0].num_new_tokens == step.num_tokens:
            num_divided += 1
            (begun,) = first.chunks
            assert begun.seq.num_computed_tokens == 12 - second.chunks[0].num_new_tokens and not begun.samples
            assert [chunk.seq for chunk in second.chunks] == [chunk.seq for chunk in step.chunks]
        else:
            assert first.chunks + second.chunks == step.chunks and first.chunks and second.chunks[0].num_new_tokens > 0
        assert (first.copies, second.copies) == ((), step.copies)
        (sampled, tokens), (first_sampled, first_tokens), (second_sampled, second_tokens) = map(
            numbers_of, (step, first, second)
        )
        assert sampled == first_sampled + second_sampled
        for kind in tokens:
            assert tokens[kind] == first_tokens.get(kind, []) + second_tokens.get(kind, [])
    assert num_divided > 10


def test_a_step_whose_rows_sample_later_or_that_copies_states_has_no_halves():
    chunks = [Chunk(scheduled(range(4), [row], entry=row), 4, True) for row in range(2)]
    assert halves(Step.of(chunks)) is not None
    assert halves(Step.of(chunks, constrained=[chunks[0].seq])) is None
    assert halves(Step.of(chunks, state_loads=[(-1, 0)])) is None
    assert halves(Step.of(chunks, state_copies=[(0, -1)])) is None


# The loop with halves, without a model


def check_result(seq: Sequence, info: RunnerInfo) -> None:
    prompt = seq.token_ids[: seq.num_prompt_tokens].tolist()
    assert seq.error is None
    if seq.pooling is not None:
        found = np.concatenate(seq.states)
        found = found.sum(0, keepdims=True) if seq.pooling.tokens == "mean" else found
        assert np.array_equal(found, expected_states(prompt, seq.pooling, info))
        return
    assert (seq.completion_token_ids, seq.finish_reason) == expected_completion(prompt, seq.sampling_params, info)
    if seq.sampling_params.prompt_logprobs is not None:
        assert bytes(seq.prompt_logprobs) == expected_scores(prompt, 1, info)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_halves_are_committed_as_two_steps(overlap):
    """Rows that share keys, end, are preempted or are broken in one half give the results of whole steps."""
    rng = random.Random(1)
    engine = make_engine(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=20, overlap=overlap)
    launch, num_halved, max_in_flight, parts = engine.runner.launch, 0, 0, []

    def short(step: Step) -> Any:
        nonlocal num_halved, max_in_flight, parts
        if not parts and rng.random() < 0.7 and (parts := [*(halves(step) or ())]):
            num_halved += 1
            raise StepTooLargeError("too large")
        parts = parts[1:]
        max_in_flight = max(max_in_flight, len(engine._in_flight) + 1)
        return launch(step)

    engine.runner.launch = short
    engine.runner.is_broken = lambda seq: seq.num_shared_tokens > 0 and seq.seq_id % 5 == 0
    finished: list[Sequence] = []
    for index in range(70):
        prompt = [*range(rng.choice([0, 9])), *(rng.randrange(50) for _ in range(rng.randint(2, 14)))]
        if index % 6 == 5:
            add_pooled(engine, prompt, Pooling(rng.choice(["all", "first", "last", "mean"])))
        else:
            params = {"max_tokens": rng.randint(1, 9), "n": rng.choice([1, 1, 3])}
            if index % 3 == 0:
                params = {"prompt_logprobs": 0, "max_tokens": rng.choice([0, 3])}
            engine.add_request(prompt, SamplingParams(**params))
        while index >= 50 and not engine.is_finished():  # each of the last ones is alone
            for seq in engine.step():
                finished.append(seq)
                check_result(seq, engine.info)
            engine.scheduler.check_integrity()
    assert len(finished) == engine._num_sequences
    assert num_halved > 20 and max_in_flight == 2 + overlap
    assert engine.metrics()["num_preemptions"] > 3 and not all(seq.may_share for seq in finished)


def test_all_halves_that_were_launched_are_waited_for_if_one_cannot_be():
    engine = make_engine(overlap=True)
    launch, num_calls = engine.runner.launch, 0

    def short(step: Step) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (1, 3):
            raise StepTooLargeError(f"step {num_calls}")
        return launch(step)

    engine.runner.launch = short
    for row in range(2):
        engine.add_request([row] * 5, SamplingParams(max_tokens=3))
    with pytest.raises(StepTooLargeError, match="step 3"):
        engine.step()
    assert engine.is_finished() and not engine.runner.in_flight
    engine.add_request([1, 2], SamplingParams(max_tokens=3))
    assert len(run_to_end(engine)) == 1
