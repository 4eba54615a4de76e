"""Weights in place: after `update_weights` an LLM is as if loaded with these weights, and a sleep leaves no trace."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_runner import make_engine
from support.family_factory import FAMILIES, save_family_model
from support.long import long, some
from support.model_factory import make_model, read_tensors, save_model, write_tensors
from support.weight_updates import (
    EMBEDDING,
    HEAD,
    OPTIONS,
    PARAMS,
    PROMPTS,
    Q_PROJ,
    Weights,
    generate,
    make_llm,
    of_fresh_llm,
    outputs_of,
    save_checkpoints,
    values,
)

import nanovllm.models.loader
from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.layers.linear import Packable


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return save_checkpoints(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(checkpoints) -> list[list[tuple[list[int], int]]]:
    return outputs_of(checkpoints)


@pytest.fixture(scope="module", params=some([1, 2], 1), ids=["one rank", "two ranks"])
def shared_llm(request, checkpoints) -> Iterator[LLM]:
    with make_llm(checkpoints[0], tensor_parallel_size=request.param) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm, checkpoints) -> LLM:
    """An LLM with the first checkpoint's weights and an empty cache."""
    shared_llm.wake_up()
    shared_llm.update_weights(read_tensors(checkpoints[0]))
    return shared_llm


# The given weights run


@pytest.mark.parametrize(
    ("family", "seed"),
    # A default run has each family once, and every second one with tied embeddings.
    [
        (long if seed == number % 2 else pytest.param)(family, seed)
        for number, family in enumerate(FAMILIES)
        for seed in (0, 1)
    ],
)
def test_an_update_leaves_the_llm_that_loading_the_weights_makes(tmp_path, family, seed):
    """The models have fused and packed projections, biases, experts, norms with an offset, or tied embeddings."""
    options = FAMILIES[family][2](random.Random(f"{family} {seed}")) | {"tie_word_embeddings": seed == 0}
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        save_family_model(tmp_path / str(number), family, options, seed=number)
    expected, weights = of_fresh_llm(tmp_path / "1")
    with make_llm(tmp_path / "0") as llm:
        assert generate(llm) != expected
        llm.update_weights(read_tensors(tmp_path / "1"))
        assert_same(values(llm), weights)
        assert generate(llm) == expected


def test_ranks_get_their_shards(llm, checkpoints, expected):
    """The version counts up."""
    version = llm.weight_version
    assert generate(llm) == expected[0]
    llm.update_weights(read_tensors(checkpoints[1]))
    assert generate(llm) == expected[1] and llm.weight_version == version + 1


@pytest.mark.parametrize(
    "part", ["q_proj", "up_proj", "down_proj", "norm", "bias", "embed", "lm_head", "layers.1.mlp.gate"]
)
def test_what_is_not_given_stays(tmp_path, checkpoints, part):
    """This holds even in a merged or packed parameter of which another part is given."""
    first, second = map(read_tensors, checkpoints)
    given = {name: tensor for name, tensor in second.items() if part in name}
    assert 0 < len(given) < len(first)
    save_model(tmp_path, attention_bias=True)
    write_tensors(tmp_path, {**first, **given})
    expected, weights = of_fresh_llm(tmp_path)
    with make_llm(checkpoints[0]) as llm:
        llm.update_weights(given)
        assert_same(values(llm), weights)
        assert generate(llm) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_any_floating_point_dtype_is_rounded_once(tmp_path, checkpoints, dtype, wanted):
    given = {name: tensor.to(dtype) for name, tensor in read_tensors(checkpoints[1]).items()}
    save_model(tmp_path, attention_bias=True)
    write_tensors(tmp_path, given)
    weights = of_fresh_llm(tmp_path, dtype=wanted)[1]
    with make_llm(checkpoints[0], dtype=wanted) as llm:
        llm.update_weights(given)
        assert_same(values(llm), weights)


def test_any_iterable_of_any_dense_tensors_is_taken(llm, checkpoints, expected):
    """The tensors are parameters of a model in training, views, tensors that share memory, and frequencies of old
    checkpoints.
    """
    model = make_model(1, attention_bias=True)
    llm.update_weights(model.named_parameters())
    assert generate(llm) == expected[1]
    transposed = {
        name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor[None].expand(2, -1)[1]
        for name, tensor in read_tensors(checkpoints[0]).items()
    }
    llm.update_weights([name, tensor] for name, tensor in transposed.items())
    assert generate(llm) == expected[0]
    llm.update_weights({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    shared = torch.ones(16)
    llm.update_weights({f"model.layers.{layer}.self_attn.q_norm.weight": shared for layer in (0, 1)})
    llm.update_weights(iter(model.state_dict().items()))
    assert generate(llm) == expected[1]


@pytest.mark.parametrize("prefix", ["", "model.model.", "language_model.model.", "module._orig_mod.model."])
def test_names_may_have_any_prefix(llm, checkpoints, expected, prefix):
    """As in a checkpoint. A trainer's model may be wrapped, or be the decoder alone."""
    wrapper = prefix.removesuffix("model.")
    weights = read_tensors(checkpoints[1])
    given = {
        name.replace("model.", prefix) if name.startswith("model.") else wrapper + name: tensor
        for name, tensor in weights.items()
    }
    assert given.keys() != weights.keys()
    llm.update_weights(given)
    assert generate(llm) == expected[1]
    llm.update_weights(read_tensors(checkpoints[0]))
    for name, tensor in given.items():
        llm.update_weights({name: tensor})
    assert generate(llm) == expected[1]


def test_a_layers_norm_is_not_the_models(llm, checkpoints):
    """The text before its name is not a wrapper's prefix."""
    with pytest.raises(ValueError, match=r"unexpected tensor model\.layers\.0\.norm\.weight"):
        llm.update_weights({"model.layers.0.norm.weight": read_tensors(checkpoints[1])["model.norm.weight"]})


def test_the_caller_may_change_its_tensors_afterwards(llm, checkpoints, expected):
    given = read_tensors(checkpoints[1])
    llm.update_weights(given)
    for tensor in given.values():
        tensor.fill_(float("nan"))
    assert generate(llm) == expected[1]


def test_parameters_stay_where_they_are(checkpoints):
    """CUDA graphs hold their addresses. In bfloat16 nothing is packed."""
    with make_llm(checkpoints[0], dtype="bfloat16") as llm:
        places = [parameter.data_ptr() for parameter in llm.engine.runner.program.model.parameters()]
        llm.update_weights(read_tensors(checkpoints[1]))
        assert [parameter.data_ptr() for parameter in llm.engine.runner.program.model.parameters()] == places


def test_only_what_is_touched_is_packed_anew(checkpoints):
    with make_llm(checkpoints[0]) as llm:
        modules = {name: it for name, it in llm.engine.runner.program.model.named_modules() if isinstance(it, Packable)}
        before = {name: module.packed for name, module in modules.items()}
        assert all(packed is not None for packed in before.values())
        llm.update_weights({Q_PROJ: read_tensors(checkpoints[1])[Q_PROJ]})
        anew = [name for name, module in modules.items() if module.packed is not before[name]]
        assert anew == ["model.layers.1.self_attn.qkv_proj"] and modules[anew[0]].weight is None


# Tied embeddings


@pytest.fixture(scope="module", params=some([1, 2], 1), ids=["one rank", "two ranks"])
def tied(request, tmp_path_factory) -> Iterator[tuple[LLM, Weights]]:
    """An LLM of a tied model, and its weights."""
    directory = tmp_path_factory.mktemp("tied")
    save_model(directory, 3, tie_word_embeddings=True)
    with make_llm(directory, tensor_parallel_size=request.param) as llm:
        yield llm, read_tensors(directory)


def test_a_tied_head_follows_the_embedding(tmp_path, tied):
    """The packed head is a separate copy of the weight."""
    llm, weights = tied
    given = {EMBEDDING: weights[EMBEDDING].flip(0)}
    save_model(tmp_path, 3, tie_word_embeddings=True)
    write_tensors(tmp_path, {**weights, **given})
    expected = of_fresh_llm(tmp_path)[0]
    alone = {HEAD: given[EMBEDDING]}
    for update in (given, {**given, HEAD: given[EMBEDDING].clone()}, {**alone, **given}, alone):
        llm.update_weights(weights)
        assert generate(llm) != expected
        llm.update_weights(update)
        assert generate(llm) == expected


@pytest.mark.parametrize("kind", ["other numbers", "another dtype", "another shape"])
def test_a_tied_head_that_is_not_the_embedding_is_refused(tied, kind):
    llm, weights = tied
    llm.update_weights(weights)
    before = generate(llm)
    embedding = weights[EMBEDDING].flip(0)
    head = {
        "other numbers": weights[EMBEDDING],
        "another dtype": embedding.double(),
        "another shape": embedding[:-1],
    }[kind]
    with pytest.raises(ValueError, match=r"tensor lm_head.weight .*differs.* model.embed_tokens.weight"):
        llm.update_weights({HEAD: head, EMBEDDING: embedding})
    assert [token_ids for token_ids, _ in generate(llm)] == [token_ids for token_ids, _ in before]


# No update is half applied


def bad_updates(weights: Weights) -> dict[str, tuple[type[Exception], str, Any]]:
    """Error, message and update of each mistake. Each update begins with the correct tensors."""

    def with_last(name: Any, tensor: Any) -> list:
        return [*weights.items(), (name, tensor)]

    q_proj, rest = weights[Q_PROJ], {name: tensor for name, tensor in weights.items() if name != Q_PROJ}
    return {
        "unknown name": (ValueError, "unexpected tensor model.norm.bias;", with_last("model.norm.bias", q_proj)),
        "fused name": (ValueError, "unexpected tensor .*qkv_proj", with_last(Q_PROJ.replace("q_", "qkv_"), q_proj)),
        "longer": (ValueError, f"{Q_PROJ} has shape .65, 32., .* .64, 32.", {**rest, Q_PROJ: torch.zeros(65, 32)}),
        "a rank's shard": (ValueError, f"{Q_PROJ} has shape", {**rest, Q_PROJ: q_proj[:32]}),
        "transposed": (ValueError, f"{Q_PROJ} has shape", {**rest, Q_PROJ: q_proj.T}),
        "scalar": (ValueError, f"{Q_PROJ} has shape", {**rest, Q_PROJ: torch.tensor(1.0)}),
        "integers": (ValueError, f"{Q_PROJ} is torch.int64; only floating", {**rest, Q_PROJ: q_proj.long()}),
        "complex": (ValueError, f"{Q_PROJ} is torch.complex64", {**rest, Q_PROJ: q_proj.to(torch.complex64)}),
        "8 bits": (ValueError, f"{Q_PROJ} is torch.float8_e5m2", {**rest, Q_PROJ: q_proj.to(torch.float8_e5m2)}),
        "twice": (ValueError, f"{Q_PROJ} is given twice", with_last(Q_PROJ, q_proj)),
        "no values": (ValueError, f"{Q_PROJ} is on meta", {**rest, Q_PROJ: q_proj.to("meta")}),
        "sparse": (ValueError, f"{Q_PROJ} is on cpu in layout torch.sparse", {**rest, Q_PROJ: q_proj.to_sparse()}),
        "an array": (TypeError, f"{Q_PROJ} is a ndarray; give", {**rest, Q_PROJ: q_proj.numpy()}),
        "none": (TypeError, f"{Q_PROJ} is a NoneType", {**rest, Q_PROJ: None}),
        "a subclass": (TypeError, f"{Q_PROJ} is a Odd", {**rest, Q_PROJ: q_proj.as_subclass(Odd)}),
        "a name that is none": (TypeError, "pairs of a name and a tensor, not tuple", with_last(3, q_proj)),
        "a triple": (TypeError, "pairs of a name and a tensor", [*weights.items(), (Q_PROJ, q_proj, 1)]),
        "names alone": (TypeError, "pairs of a name and a tensor", list(weights)),
        "no iterable": (TypeError, "weights must be a dict or an iterable", 3),
    }


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize("what", bad_updates({Q_PROJ: torch.zeros(64, 32)}))
def test_a_bad_update_changes_nothing(llm, checkpoints, expected, what):
    """The bad tensor comes last, after good tensors of another model."""
    error, message, update = bad_updates(read_tensors(checkpoints[1]))[what]
    version = llm.weight_version
    with pytest.raises(error, match=message):
        llm.update_weights(update)
    assert llm.weight_version == version
    assert generate(llm) == expected[0]


def test_an_error_of_the_callers_iterator_changes_nothing(llm, checkpoints, expected):
    def given():
        yield from list(read_tensors(checkpoints[1]).items())[:5]
        raise LookupError("the trainer's own")

    with pytest.raises(LookupError, match="the trainer's own"):
        llm.update_weights(given())
    assert generate(llm) == expected[0]


@pytest.mark.parametrize("after", [0, 1, 7, 12])
def test_an_update_that_was_cut_off_must_be_repeated(checkpoints, expected, monkeypatch, after):
    """Until then, the weights are a mixture and perhaps not packed. Sampling from them must fail."""
    fill, num_filled = nanovllm.models.loader._fill, 0

    def interrupted(*arguments):
        nonlocal num_filled
        if num_filled == after:
            raise KeyboardInterrupt
        num_filled += 1
        fill(*arguments)

    second = read_tensors(checkpoints[1])
    with make_llm(checkpoints[0]) as llm:
        assert generate(llm) == expected[0]
        monkeypatch.setattr(nanovllm.models.loader, "_fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(second)
        monkeypatch.undo()
        assert llm.weight_version == 0
        for call in (generate, lambda llm: llm.generate_iter(PROMPTS), lambda llm: llm.engine.add_request([1], PARAMS)):
            with pytest.raises(RuntimeError, match=r"tensors are undefined.* lm_head.weight.*update_weights\(\)"):
                call(llm)
        llm.update_weights({Q_PROJ: second[Q_PROJ]})
        with pytest.raises(RuntimeError, match=f"^{len(second) - 1} tensors are undefined"):
            generate(llm)
        llm.update_weights(second)
        assert generate(llm) == expected[1]
        assert_same(values(llm), of_fresh_llm(checkpoints[1])[1])


# The cache and the version


def test_no_key_of_the_old_weights_is_read(llm, checkpoints, expected):
    generate(llm)
    assert any(num_cached for _, num_cached in generate(llm))
    llm.update_weights({})
    assert generate(llm) == expected[0]
    llm.update_weights(read_tensors(checkpoints[1]))
    assert generate(llm) == expected[1]


def test_the_prefix_cache_can_be_emptied(llm, expected):
    generate(llm)
    for _ in range(2):
        llm.reset_prefix_cache()
        assert generate(llm) == expected[0]
    assert [token_ids for token_ids, _ in generate(llm)] == [token_ids for token_ids, _ in expected[0]]
    llm.engine.scheduler.check_integrity()


def test_every_output_has_the_version_of_its_weights(checkpoints):
    """Also the outputs of rows that cannot run."""
    with make_llm(checkpoints[0]) as llm:
        for version in range(3):
            assert llm.weight_version == version
            outputs = llm.generate([[1], []], PARAMS, use_tqdm=False)
            outputs += list(llm.generate_iter([[1], []], PARAMS))
            assert [output.weight_version for output in outputs] == [version] * 4
            assert outputs[0]["weight_version"] == version
            llm.update_weights({})


# Only while nothing else runs

ALTERATIONS = {
    "update_weights": lambda llm: llm.update_weights({}),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_open_iterator_forbids_it(llm, expected, name):
    iterator = llm.generate_iter(PROMPTS, PARAMS)
    first = next(iterator)
    with pytest.raises(RuntimeError, match="an iterator of generate_iter has not finished"):
        ALTERATIONS[name](llm)
    outputs = [first, *iterator]
    assert [(output.token_ids, output.num_cached_tokens) for output in outputs] == expected[0]


@pytest.mark.parametrize("name", ALTERATIONS)
def test_requests_added_by_hand_forbid_it(llm, name):
    seq_id = llm.engine.add_request([1, 2], PARAMS)
    with pytest.raises(RuntimeError, match="finish or abort them first"):
        ALTERATIONS[name](llm)
    if name != "wake_up":  # `wake_up` has no effect on an engine that is awake
        with pytest.raises(RuntimeError, match="finish or abort them first"):
            getattr(llm.engine, name)(*{"update_weights": [[]], "sleep": [1]}.get(name, []))
    llm.engine.abort(seq_id)
    ALTERATIONS[name](llm)


@pytest.mark.parametrize("name", ["generate", "weights_digest", *ALTERATIONS])
def test_a_signal_handler_during_an_update_can_do_nothing(checkpoints, monkeypatch, name):
    call = {"generate": generate, "weights_digest": LLM.weights_digest, **ALTERATIONS}[name]
    refusals = []

    def on_signal(number, frame) -> None:
        with pytest.raises(RuntimeError, match="in the middle of a call") as caught:
            call(llm)
        refusals.append(caught)
        with pytest.raises(RuntimeError, match="in the middle of a step or request"):
            llm.engine.add_request([1], PARAMS)

    with make_llm(checkpoints[0]) as llm:
        update = llm.engine.runner.load_update
        monkeypatch.setattr(
            llm.engine.runner, "load_update", lambda given: (signal.raise_signal(signal.SIGUSR1), update(given))
        )
        before = signal.signal(signal.SIGUSR1, on_signal)
        try:
            llm.update_weights(read_tensors(checkpoints[1]))
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(refusals) == 1 and llm.weight_version == 1 and not llm.is_sleeping


@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_closed_llm_says_so(checkpoints, name):
    llm = make_llm(checkpoints[0])
    llm.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        ALTERATIONS[name](llm)


def test_an_engine_without_weights_says_so():
    with pytest.raises(RuntimeError, match="no weights"):
        make_engine().update_weights([])


# Sleep


@pytest.mark.parametrize("times", [1, 2])
def test_a_sleep_leaves_no_trace_but_an_empty_cache(llm, expected, times):
    version, num_blocks = llm.weight_version, llm.metrics()["num_kvcache_blocks"]
    memory = llm.metrics()["memory_bytes"]
    for _ in range(2):
        generate(llm)
        for _ in range(times):
            llm.sleep()
            assert llm.is_sleeping
        assert llm.metrics()["memory_bytes"] == {**memory, "kv_cache": 0}
        for _ in range(times):
            llm.wake_up()
            assert not llm.is_sleeping
        assert generate(llm) == expected[0]
        assert llm.metrics()["memory_bytes"] == memory
    assert (llm.weight_version, llm.metrics()["num_kvcache_blocks"]) == (version, num_blocks)


@pytest.mark.parametrize("backend", ["sdpa", "torch", "triton"])
def test_the_buffers_of_attention_sleep_as_well(tmp_path, backend):
    save_model(tmp_path, num_hidden_layers=1)
    sizes = {"max_num_seqs": 2, "max_model_len": 32, "kvcache_block_size": 16, "num_kvcache_blocks": 8}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with make_llm(tmp_path, attention_backend=backend, **sizes) as llm:
        expected = [output.token_ids for output in llm.generate([[1, 2], [3]], params, use_tqdm=False)]
        llm.sleep()
        held = [
            value
            for value in vars(llm.engine.runner.program.backend).values()
            if isinstance(value, torch.Tensor | dict)
        ]
        tensors = [it for value in held for it in (value.values() if isinstance(value, dict) else [value])]
        assert all(it.untyped_storage().nbytes() == 0 for it in tensors if isinstance(it, torch.Tensor))
        assert (len(tensors) > 2) == (backend == "triton")
        llm.wake_up()
        assert [output.token_ids for output in llm.generate([[1, 2], [3]], params, use_tqdm=False)] == expected


@pytest.mark.parametrize("levels", [[2], [2, 2], [1, 2], [2, 1]], ids=str)
def test_after_a_deep_sleep_all_weights_must_be_given(llm, checkpoints, expected, levels):
    """They may come in any number of updates."""
    second, memory = read_tensors(checkpoints[1]), llm.metrics()["memory_bytes"]
    for level in levels:
        llm.sleep(level)
    assert sum(llm.metrics()["memory_bytes"].values()) == 0
    llm.wake_up()
    names = sorted(second)
    for start in range(0, len(names), 10):
        with pytest.raises(RuntimeError, match=rf"{len(names) - start} tensors are undefined.*: {names[start]}"):
            generate(llm)
        llm.update_weights({name: second[name] for name in names[start : start + 10]})
    assert generate(llm) == expected[1]
    assert llm.metrics()["memory_bytes"] == memory


def test_a_refused_update_after_a_deep_sleep_gives_nothing(llm, checkpoints, expected):
    second = read_tensors(checkpoints[1])
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(ValueError, match="unexpected tensor x"):
        llm.update_weights({**second, "x": second[HEAD]})
    with pytest.raises(RuntimeError, match=f"{len(second)} tensors are undefined"):
        generate(llm)
    llm.update_weights(second)
    assert generate(llm) == expected[1]


def test_a_tied_model_sleeps_as_deep(tied):
    """With two ranks, the second rank's part of the vocabulary ends with padding."""
    llm, weights = tied
    llm.update_weights(weights)
    before = generate(llm)
    llm.sleep(2)
    assert sum(llm.metrics()["memory_bytes"].values()) == 0
    llm.wake_up()
    llm.update_weights(weights)
    assert generate(llm) == before


CALLS = {
    "generate": lambda llm: llm.generate("Hi", PARAMS, use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hi"}], PARAMS, use_tqdm=False),
    "generate_iter": lambda llm: llm.generate_iter("Hi", PARAMS),
    "add_request": lambda llm: llm.engine.add_request([65], PARAMS),
    "update_weights": lambda llm: llm.update_weights({}),
}


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_refuses_to_generate(level):
    with LLM(MODEL_DIRECTORY, **OPTIONS) as llm:
        llm.sleep(level)
        for call in CALLS.values():
            with pytest.raises(RuntimeError, match=r"sleeps.*call wake_up\(\) first"):
                call(llm)
        llm.reset_prefix_cache()
        assert llm.weight_version == 0 and llm.is_sleeping
        llm.wake_up()
        if level == 1:
            assert llm.generate("Hi", PARAMS, use_tqdm=False)[0].error is None


def test_it_can_be_closed_asleep(checkpoints):
    llm = make_llm(checkpoints[0])
    llm.sleep(2)
    llm.close()
    llm.close()


@pytest.mark.parametrize("level", [0, 3, -1, "1", 1.0, True, None])
def test_other_levels_are_refused(llm, expected, level):
    with pytest.raises((TypeError, ValueError), match="level"):
        llm.sleep(level)
    assert not llm.is_sleeping and generate(llm) == expected[0]


@pytest.mark.parametrize("level", [1, 2])
def test_without_room_it_sleeps_on_and_can_be_woken_later(checkpoints, expected, monkeypatch, level):
    with make_llm(checkpoints[0]) as llm:
        runner = llm.engine.runner
        llm.sleep(level)
        with monkeypatch.context() as patch:
            patch.setattr("nanovllm.runner.settings.free_bytes", lambda device: 10_000)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"waking up needs .* are free; free what others hold"):
                    llm.wake_up()
                assert llm.is_sleeping and llm.metrics()["memory_bytes"]["kv_cache"] == 0
        with monkeypatch.context() as patch:
            patch.setattr(runner, "capture", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                llm.wake_up()
            assert llm.is_sleeping and runner.program.kv_cache.nbytes_released > 0
            assert (llm.metrics()["memory_bytes"]["weights"] == 0) == (level == 2)
        llm.wake_up()
        if level == 2:
            llm.update_weights(read_tensors(checkpoints[0]))
        assert generate(llm) == expected[0]
