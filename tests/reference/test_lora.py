"""LLM with LoRA adapters gives the tokens of peft's own model: one adapter per call, which is merged, and several in a
call, which are computed side by side."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.adapters import save_peft_adapter
from support.against_transformers import TIE, logit_gap, ragged_prompts, reference_completions
from support.family_factory import FAMILIES, make_family_model, save_family_model
from support.long import long

from nanovllm import LLM, NOT_YET, LoRARequest, SamplingParams

peft = pytest.importorskip("peft")

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 199,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 96, "kvcache_block_size": 4, "max_num_batched_tokens": 24, "enable_lora": True,
    "max_lora_rank": 256,
}  # fmt: skip
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "target_modules": "all-linear", "r": 8, "lora_alpha": 12, "alpha_pattern": {"v_proj": 3},
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 5},
}  # fmt: skip


class Case(NamedTuple):
    """Two adapters of one model, as fields of peft's LoraConfig."""

    first: dict[str, Any]
    second: dict[str, Any]


CASES = {
    "q and v": Case({"target_modules": ["q_proj", "v_proj"], "r": 1}, {"target_modules": ["v_proj"], "r": 3}),
    "all": Case({"target_modules": "all-linear", "r": 8}, {"target_modules": ["o_proj", *MLP], "r": 16}),
    "rslora and patterns": Case({"target_modules": ATTENTION, "r": 4, "use_rslora": True}, PATTERNS),
    "rank 256": Case({"target_modules": MLP, "r": 256}, {"target_modules": ATTENTION, "r": 64, "lora_alpha": 5}),
    "k": Case({"target_modules": ["k_proj"], "r": 2}, {"target_modules": ["gate_proj"], "r": 2}),
    "up": Case({"target_modules": ["up_proj"], "r": 7}, {"target_modules": ["q_proj"], "r": 32}),
}


class Subject(NamedTuple):
    """A model with adapters, and what peft's model answers. None is the model itself.

    models: peft's model of each adapter, by the adapter's name.
    """

    directory: str
    adapters: dict[str, LoRARequest]
    models: dict[str | None, Any]
    prompts: list[list[int]]
    expected: dict[str | None, list[list[int]]]

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else self.adapters[name]

    def check(self, name: str | None, prompt: int, tokens: list[int]) -> None:
        theirs = self.expected[name][prompt]
        if tokens != theirs:
            gap = logit_gap(self.models[name], self.prompts[prompt], tokens, theirs)
            assert gap < TIE, f"adapter {name}, prompt {prompt}: {tokens} instead of {theirs}, logits {gap} apart"


def make_subject(directory: Path, family: str, options: dict[str, Any], case: Case) -> Subject:
    save_family_model(directory / "base", family, options, seed=1)
    adapters, models = {}, {None: make_family_model(family, options, seed=1)}
    for number, (name, config) in enumerate(zip("ab", case, strict=True), 1):
        save_peft_adapter(make_family_model(family, options, seed=1), directory / name, seed=number, **config)
        models[name] = peft.PeftModel.from_pretrained(make_family_model(family, options, seed=1), directory / name)
        adapters[name] = LoRARequest(name, number, str(directory / name))
    prompts = ragged_prompts(random.Random(3), options["vocab_size"])
    expected = {name: reference_completions(model, prompts, NUM_TOKENS) for name, model in models.items()}
    assert expected[None] != expected["a"] != expected["b"] != expected[None]
    return Subject(str(directory / "base"), adapters, models, prompts, expected)


@pytest.fixture(scope="module", params=[each if each in ("q and v", "all") else long(each) for each in CASES])
def subject(request, tmp_path_factory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("model"), "qwen3", SMALL, CASES[request.param])


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("model"), "qwen3", SMALL, CASES["all"])


def mixed_rows(subject: Subject, seed: int = 0) -> list[tuple[int, str | None]]:
    rows = [(index, name) for index in range(len(subject.prompts)) for name in (None, "a", "b")]
    random.Random(seed).shuffle(rows)
    return rows


def check_in_turn(llm: LLM, subject: Subject, shares: bool = True) -> None:
    for turn, name in enumerate((None, "a", None, "b", "a")):
        outputs = llm.generate(subject.prompts, GREEDY, use_tqdm=False, lora_request=subject.request(name))
        for index, output in enumerate(outputs):
            subject.check(name, index, output.token_ids)
        num_before = (0, 0, 1, 0, 1)[turn]  # earlier calls with this adapter
        longest = max(range(len(outputs)), key=lambda index: len(subject.prompts[index]))
        assert not shares or outputs[longest].num_cached_tokens >= 4 * num_before


def check_mixed(llm: LLM, subject: Subject, rows: list[tuple[int, str | None]]) -> None:
    prompts, adapters = [subject.prompts[index] for index, _ in rows], [subject.request(name) for _, name in rows]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)
    for (index, name), output in zip(rows, outputs, strict=True):
        assert output.error is None
        subject.check(name, index, output.token_ids)


def test_tokens_are_those_of_pefts_own_model(subject):
    """In turn, then in one call: with a cold cache, and with keys that each way computed."""
    with LLM(subject.directory, **OPTIONS) as llm:
        check_in_turn(llm, subject)
        check_mixed(llm, subject, mixed_rows(subject))
        check_in_turn(llm, subject)
    with LLM(subject.directory, **OPTIONS, overlap=False, max_num_seqs=3) as llm:
        check_mixed(llm, subject, mixed_rows(subject, seed=1))
        check_in_turn(llm, subject)


@pytest.mark.parametrize(
    "family",
    [each if each == "phi3" else long(each) for each in ("phi3", "qwen2", "gemma3", "olmo2", "qwen3_moe", "qwen3_5")],
)
def test_tokens_of_other_families_are_pefts(family, tmp_path):
    """Merged tensors, biases, windows, norms of projections, experts beside the attention, recurrent layers."""
    options = {**FAMILIES[family][2](random.Random(5)), "vocab_size": 199}
    names = ["qkv_proj", "gate_up_proj"] if family == "phi3" else ["q_proj", "v_proj"]
    if family == "qwen3_5":
        names += ["in_proj_qkv", "out_proj"]
    case = Case({"target_modules": names, "r": 4}, {"target_modules": ["o_proj"], "r": 2})
    subject = make_subject(tmp_path, family, options, case)
    with LLM(subject.directory, **OPTIONS) as llm:
        check_mixed(llm, subject, mixed_rows(subject))
        check_in_turn(llm, subject, shares=family != "qwen3_5")  # such short prompts get no snapshots of states


def test_tokens_of_two_ranks_are_pefts(one):
    with LLM(one.directory, **OPTIONS, tensor_parallel_size=2) as llm:
        digest = llm.weights_digest()
        check_in_turn(llm, one)
        check_mixed(llm, one, mixed_rows(one))
        assert llm.weights_digest() == digest


def test_more_adapters_than_slots_take_turns(one):
    with LLM(one.directory, **{**OPTIONS, "max_loras": 1}) as llm:
        check_mixed(llm, one, mixed_rows(one))


def test_the_base_after_twenty_switches_is_the_base_before(one):
    with LLM(one.directory, **OPTIONS) as llm:
        before = llm.weights_digest(per_tensor=True)
        for number in range(20):
            llm.generate(one.prompts[:1], GREEDY, use_tqdm=False, lora_request=one.request("ab"[number % 2]))
        assert llm.weights_digest(per_tensor=True) == before
        check_in_turn(llm, one)


def test_every_call_takes_adapters(one):
    """The numbers of both ways are the same up to rounding; those of other adapters are not."""
    prompts, ids = one.prompts, [1, 2, 3]
    with LLM(one.directory, **OPTIONS) as llm:
        calls = {
            "embed": lambda lora: [each.embedding for each in llm.embed(prompts, use_tqdm=False, lora_request=lora)],
            "encode": lambda lora: [each.data for each in llm.encode(prompts, use_tqdm=False, lora_request=lora)],
            "label": lambda lora: [each.probs for each in llm.label(prompts, [ids[:2], [7]], False, lora_request=lora)],
            "loglikelihood": lambda lora: [
                each.logprobs for each in llm.loglikelihood(prompts, ids, use_tqdm=False, lora_request=lora)
            ],
            "generate_iter": lambda lora: [
                np.array(each.token_ids) for each in llm.generate_iter(iter(prompts), GREEDY, lora_request=lora)
            ],
            "embed_iter": lambda lora: [each.embedding for each in llm.embed_iter(iter(prompts), lora_request=lora)],
        }  # fmt: skip
        names = [(None, "a", "b")[index % 3] for index in range(len(prompts))]
        for what, call in calls.items():
            alone = {name: call(one.request(name)) for name in (None, "a", "b")}
            mixed = call([one.request(name) for name in names])
            for index, name in enumerate(names):
                assert np.allclose(mixed[index], alone[name][index], atol=1e-4), (what, index)
                other = alone["a" if name != "a" else "b"][index]
                assert what == "label" or not np.allclose(mixed[index], other, atol=1e-4), (what, index)


def test_tensors_in_memory_are_an_adapter(one):
    from safetensors.torch import load_file

    directory = Path(one.directory).parent / "a"
    tensors = load_file(directory / "adapter_model.safetensors")
    config = peft.LoraConfig.from_pretrained(directory).to_dict()
    request = LoRARequest("policy", 9, tensors=tensors, config=config)
    with LLM(one.directory, **OPTIONS) as llm:
        for lora in (request, [request, None] * 4):
            outputs = llm.generate(one.prompts, GREEDY, use_tqdm=False, lora_request=lora)
            for index, output in enumerate(outputs):
                one.check("a" if lora is request or index % 2 == 0 else None, index, output.token_ids)
        zero = LoRARequest("policy", 9, **zeros_of(one, "a"))
        outputs = llm.generate(one.prompts, GREEDY, use_tqdm=False, lora_request=zero)
        for index, output in enumerate(outputs):
            one.check(None, index, output.token_ids)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["float32", "fp8"])
def test_no_schedule_changes_a_byte_of_a_row_with_an_adapter(one, options):
    """With deterministic=True, an adapter is never merged. So it does not matter which adapters other rows have."""
    rows = mixed_rows(one)
    params = [SamplingParams(temperature=0.8, max_tokens=6, seed=row, logprobs=1) for row in range(len(rows))]
    prompts, adapters = [one.prompts[index] for index, _ in rows], [one.request(name) for _, name in rows]

    def numbers(llm: LLM, chosen: list[int], lora: Any) -> list[Any]:
        some_prompts, some_params = [prompts[row] for row in chosen], [params[row] for row in chosen]
        outputs = llm.generate(some_prompts, some_params, use_tqdm=False, lora_request=lora)
        return [(output.token_ids, output.outputs[0].logprobs.of_tokens.tobytes()) for output in outputs]

    every = list(range(len(rows)))
    with LLM(one.directory, **OPTIONS, **options, deterministic=True) as llm:
        together = numbers(llm, every, adapters)
        alone = [numbers(llm, [row], adapters[row])[0] for row in every]
    more = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "enable_prefix_caching": False, "overlap": False}
    with LLM(one.directory, **{**OPTIONS, **more, **options}, deterministic=True) as llm:
        in_chunks = numbers(llm, every, adapters)
    assert together == alone == in_chunks


def test_weights_in_fp8_have_adapters_beside_them(one):
    zero = LoRARequest("zero", 7, **zeros_of(one, "a"))
    options = {**OPTIONS, "quantization": "fp8"}
    with LLM(one.directory, **{**options, "enable_lora": False}) as llm:
        base = [output.token_ids for output in llm.generate(one.prompts, GREEDY, use_tqdm=False)]
    with LLM(one.directory, **options) as llm:
        of_zero = [each.token_ids for each in llm.generate(one.prompts, GREEDY, use_tqdm=False, lora_request=zero)]
        assert of_zero == base
        of_base, in_fp8 = (scores_of(llm, one, names) for names in ((None,), (None, "a", "b")))
    with LLM(one.directory, **OPTIONS) as llm:
        in_float32 = scores_of(llm, one, (None, "a", "b"))
    assert np.corrcoef(in_fp8, in_float32)[0, 1] > 0.95 > 0.8 > np.corrcoef(of_base, in_float32)[0, 1]


def scores_of(llm: LLM, subject: Subject, names: tuple[str | None, ...]) -> np.ndarray:
    """Log-probabilities of continuations, whose adapters take turns."""
    adapters = [subject.request(names[index % len(names)]) for index in range(len(subject.prompts))]
    outputs = llm.loglikelihood(subject.prompts, [1, 2, 3], use_tqdm=False, lora_request=adapters)
    return np.concatenate([output.logprobs for output in outputs])


def zeros_of(subject: Subject, name: str) -> dict[str, Any]:
    """The tensors and the config of an adapter, with all numbers 0."""
    from safetensors.torch import load_file

    directory = Path(subject.directory).parent / name
    tensors = load_file(directory / "adapter_model.safetensors")
    config = peft.LoraConfig.from_pretrained(directory).to_dict()
    return {"tensors": {key: tensor * 0 for key, tensor in tensors.items()}, "config": config}


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_outlive_sleep(one, level):
    with LLM(one.directory, **OPTIONS) as llm:
        check_mixed(llm, one, mixed_rows(one))
        llm.generate(one.prompts[:1], GREEDY, use_tqdm=False, lora_request=one.request("a"))
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(one.models[None].state_dict())
        check_mixed(llm, one, mixed_rows(one, seed=2))
        check_in_turn(llm, one)


def test_new_weights_get_the_adapter_that_was_merged_into_the_old_ones(one):
    base = one.models[None].state_dict()
    with LLM(one.directory, **OPTIONS) as llm:
        llm.generate(one.prompts[:1], GREEDY, use_tqdm=False, lora_request=one.request("a"))
        llm.update_weights({name: tensor * 2 for name, tensor in base.items()})
        llm.generate(one.prompts[:1], GREEDY, use_tqdm=False, lora_request=one.request("a"))
        llm.update_weights(base)
        check_in_turn(llm, one)


def test_float16_holds_factors_that_it_could_not_hold_as_they_are(one):
    """Both factors are out of its range, and their product is not."""
    from safetensors.torch import load_file

    directory = Path(one.directory).parent / "a"
    config = peft.LoraConfig.from_pretrained(directory).to_dict()
    tensors = {
        name: tensor * (1e-9 if "lora_A" in name else 1e9)
        for name, tensor in load_file(directory / "adapter_model.safetensors").items()
    }
    wild = LoRARequest("wild", 3, tensors=tensors, config=config)
    with LLM(one.directory, **OPTIONS, dtype="float16") as llm:
        for lora in (wild, [wild, one.request("b")] * (len(one.prompts) // 2)):
            outputs = llm.generate(one.prompts, GREEDY, use_tqdm=False, lora_request=lora)
            tame = one.request("a") if lora is wild else [one.request("a"), one.request("b")] * (len(one.prompts) // 2)
            expected = llm.generate(one.prompts, GREEDY, use_tqdm=False, lora_request=tame)
            same = [found.token_ids == wanted.token_ids for found, wanted in zip(outputs, expected, strict=True)]
            assert sum(same) >= len(same) - 1


def test_a_list_means_the_same_to_generate_and_generate_iter(one):
    """All rows with one adapter: it is merged, whatever its rank. None alone needs no option."""
    with LLM(one.directory, **{**OPTIONS, "max_lora_rank": 8}) as llm:
        request, num_rows = one.request("b"), len(one.prompts)
        assert llm.provenance()["enable_lora"] is True
        for outputs in (
            llm.generate(one.prompts, GREEDY, use_tqdm=False, lora_request=[request] * num_rows),
            list(llm.generate_iter(one.prompts, GREEDY, lora_request=[request] * num_rows)),
        ):
            for index, output in enumerate(outputs):
                one.check("b", index, output.token_ids)
        alone = llm.embed(one.prompts, use_tqdm=False, lora_request=request)
        iterated = list(llm.embed_iter(one.prompts, lora_request=[request] * num_rows))
        assert all(np.allclose(a.embedding, b.embedding) for a, b in zip(alone, iterated, strict=True))
    with LLM(one.directory, **{**OPTIONS, "enable_lora": False}) as llm:
        outputs = llm.generate_iter(one.prompts, GREEDY, lora_request=[None] * num_rows)
        for index, output in enumerate(outputs):
            one.check(None, index, output.token_ids)
        assert "enable_lora" not in llm.provenance()


def test_a_digest_during_an_iteration_does_not_change_its_weights(one):
    """Between two rows nothing runs, but the iterator is open."""
    with LLM(one.directory, **OPTIONS) as llm:
        may_go_on: list[bool] = []

        def prompts():
            yield one.prompts[0]
            while not may_go_on:
                yield NOT_YET
            yield one.prompts[1]

        outputs = llm.generate_iter(prompts(), GREEDY, lora_request=one.request("a"))
        first = next(outputs)
        assert llm.engine.is_finished()
        with pytest.raises(RuntimeError, match="an adapter is merged into the weights"):
            llm.weights_digest()
        may_go_on.append(True)
        one.check("a", 0, first.token_ids)
        one.check("a", 1, next(outputs).token_ids)
        outputs.close()
        llm.weights_digest()


def test_calls_that_cannot_heed_an_adapter_are_refused(one, tmp_path):
    adapters = [one.request("a"), one.request("b")]
    message = r"lora_request needs LLM\(enable_lora=True\)"
    with LLM(one.directory, **{**OPTIONS, "enable_lora": False}) as llm, pytest.raises(ValueError, match=message):
        llm.generate([[1], [2]], GREEDY, lora_request=adapters[0])
    for options in ({"deterministic": True}, {"quantization": "fp8"}):
        nowhere = LoRARequest("nowhere", 3, str(tmp_path / "nowhere"))
        message = "'nowhere'.*nowhere' is not a directory"
        with LLM(one.directory, **OPTIONS, **options) as llm, pytest.raises(ValueError, match=message):
            llm.generate([[1]], GREEDY, lora_request=nowhere)
    with LLM(one.directory, **{**OPTIONS, "max_lora_rank": 8}) as llm:
        good, bad = llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False, lora_request=adapters)
        assert good.error is None and "max_lora_rank" in bad.error and bad.lora_request is adapters[1]
        assert llm.generate([[3, 4]], GREEDY, use_tqdm=False, lora_request=adapters[1])[0].error is None
        missing = LoRARequest("c", 3, str(tmp_path))
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            llm.generate([[1]], GREEDY, lora_request=missing)
        for prompts in ([[1]], iter([[1]])):
            with pytest.raises(
                ValueError, match="2 lora_requests for 1 prompts" if isinstance(prompts, list) else "not"
            ):
                next(
                    llm.generate_iter(prompts, GREEDY, lora_request=adapters if isinstance(prompts, list) else missing)
                )
        with pytest.raises(TypeError, match="must be a LoRARequest or None"):
            llm.generate_iter([[1]], GREEDY, lora_request={"a": adapters[0]})
        huge = LoRARequest("huge", 9, tensors=zeros_of(one, "a")["tensors"], config={"r": 8, "lora_alpha": 10**400})
        with pytest.raises(ValueError, match=r"adapter 'huge': lora_alpha of .* must be a number up to 1e"):
            llm.generate([[1]], GREEDY, lora_request=huge)
        with pytest.raises(ValueError, match=r"prompt 1: .*adapter_config\.json"):
            llm.generate([[1], [2]], GREEDY, lora_request=[None, missing], raise_on_error=True)
