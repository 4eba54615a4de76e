"""vLLM's keywords: accepted, renamed, or refused with the reason."""

import copy
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from nanovllm import LLM, Config, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams
from nanovllm.accepted import (
    ACCEPTED_ARGUMENTS,
    ACCEPTED_BY_RESET,
    ACCEPTED_LORA,
    ACCEPTED_OPTIONS,
    ACCEPTED_PARAMETERS,
    ACCEPTED_POOLING,
    ACCEPTED_STRUCTURED_OUTPUTS,
    RENAMED_ARGUMENTS,
    RENAMED_LORA,
    RENAMED_OPTIONS,
    RENAMED_PARAMETERS,
    RENAMED_POOLING,
    Accepted,
)
from nanovllm.checks import _warn_once, suggests_names
from nanovllm.demo import MODEL_DIRECTORY

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL = {"device": "cpu", "max_model_len": 128}
ANY = [name for name, option in ACCEPTED_OPTIONS.items() if option.values is None]
SOME = [name for name, option in ACCEPTED_OPTIONS.items() if option.values is not None]


@pytest.fixture(autouse=True)
def nothing_was_logged():
    _warn_once.cache_clear()


@suggests_names("option", {}, ACCEPTED_OPTIONS, RENAMED_OPTIONS)
class Options:
    """Takes keywords as LLM does, without a model."""

    def __init__(self, *, kvcache_block_size: int | None = None, seed: int = 0, dtype: "str | None" = "auto"):
        self.taken = {"kvcache_block_size": kvcache_block_size, "seed": seed, "dtype": dtype}


def test_options_that_change_nothing_are_accepted_with_one_line(caplog):
    """`trust_remote_code=True` alone once stopped half of the scripts written for vLLM."""
    with LLM(MODEL_DIRECTORY, **SMALL) as llm:
        (expected,) = llm.generate("Q: What is 2 + 3?\nA:", GREEDY, use_tqdm=False)
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        options = {**dict.fromkeys(ANY, 4), **{name: ACCEPTED_OPTIONS[name].values[-1] for name in SOME}}
        with LLM(MODEL_DIRECTORY, **SMALL, **options) as llm:
            (output,) = llm.generate("Q: What is 2 + 3?\nA:", GREEDY, use_tqdm=False)
    assert output.token_ids == expected.token_ids
    (record,) = caplog.records
    assert all(f"{name} ({ACCEPTED_OPTIONS[name].reason})" in record.getMessage() for name in ANY)
    assert not any(name in re.sub(r"\(.*?\)", "", record.getMessage()) for name in SOME)


@pytest.mark.parametrize("name", SOME)
def test_an_option_that_asks_for_more_is_refused_with_what_to_do(name):
    option = ACCEPTED_OPTIONS[name]
    for value in option.values:
        Options(**{name: value})
    for value in ("something else", -1, np.ones(3)):
        with pytest.raises(ValueError, match=f"^{name} cannot be .*{re.escape(option.reason)}$"):
            Options(**{name: value})


@pytest.mark.parametrize("name", ACCEPTED_PARAMETERS)
def test_a_sampling_parameter_that_asks_for_more_is_refused_with_what_to_do(name, caplog):
    parameter = ACCEPTED_PARAMETERS[name]
    for value in parameter.values or (None, 1):
        assert SamplingParams(temperature=0.5, **{name: value}) == SamplingParams(temperature=0.5)
    assert len(caplog.records) == (parameter.values is None)
    if parameter.values is not None:
        with pytest.raises(ValueError, match=f"^{name} cannot be 7; {re.escape(parameter.reason)}$"):
            SamplingParams(**{name: 7})


def test_vllms_parameters_of_structured_outputs_are_heeded_or_refused(caplog):
    given = {"json_object": None, "backend": "xgrammar", "disable_fallback": True, "structural_tag": None}
    given |= {"whitespace_pattern": " ?", "disable_additional_properties": True, "disable_any_whitespace": False}
    found = StructuredOutputsParams({"properties": {}}, None, None, None, **given)
    assert found.json == '{"properties":{},"additionalProperties":false}' and found.whitespace_pattern == " ?"
    (record,) = caplog.records
    assert "backend (" in record.getMessage() and "structural_tag" not in record.getMessage()
    with pytest.raises(
        ValueError, match=r"structural_tag cannot be .*; nanovllm has no structural tags; write a gramm"
    ):
        StructuredOutputsParams(regex="a", structural_tag="{}")
    assert not ACCEPTED_STRUCTURED_OUTPUTS.keys() & {*StructuredOutputsParams.__slots__}


def test_vllms_names_of_our_options_are_heeded():
    with LLM(MODEL_DIRECTORY, **SMALL, block_size=16, num_gpu_blocks_override=20) as llm:
        assert (llm.engine.info.kvcache_block_size, llm.engine.info.num_kvcache_blocks) == (16, 20)
    assert Options(block_size=16).taken["kvcache_block_size"] == 16
    with pytest.raises(TypeError, match="kvcache_block_size is given twice"):
        Options(block_size=16, kvcache_block_size=16)


def test_none_means_the_default():
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_tokens",
        "stop",
        "seed",
        "n",
        "repetition_penalty",
        "ignore_eos",
    )
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(None, 5, None, top_p=None) == SamplingParams(max_tokens=5)
    assert SamplingParams(max_tokens=None).max_tokens is None, "None means something here"
    assert Config("m", dtype=None, seed=None, enforce_eager=None) == Config("m")
    assert Options(seed=None, dtype=None).taken == {"kvcache_block_size": None, "seed": 0, "dtype": None}


def test_values_are_cloned_and_made_from_optional_ones():
    params = SamplingParams.from_optional(temperature=0.3, top_p=None, stop="x", logit_bias={5: 1.0}, best_of=None)
    assert params == SamplingParams(temperature=0.3, stop="x", logit_bias={5: 1.0})
    assert params.clone() == params and params.clone() is not params


def test_minus_one_is_no_seed():
    assert SamplingParams(seed=-1) == SamplingParams() and Config("m", seed=-1) == Config("m")


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL_DIRECTORY, **SMALL) as llm:
        yield llm


def test_calls_take_vllms_arguments(llm, caplog):
    question = "Q: What is 2 + 3?\nA:"
    (expected,) = llm.generate(question, GREEDY, False)
    none = dict.fromkeys(("lora_request", "priority", "prompt_adapter_request", "tokenization_kwargs"))
    (output,) = llm.generate(prompts=[question], sampling_params=GREEDY, use_tqdm=False, **none)
    assert output.token_ids == expected.token_ids
    (output,) = llm.generate(prompt_token_ids=[expected.prompt_token_ids], sampling_params=GREEDY, use_tqdm=False)
    assert output.token_ids == expected.token_ids
    (output,) = llm.generate(prompts=None, prompt_token_ids=expected.prompt_token_ids, sampling_params=GREEDY)
    assert output.token_ids == expected.token_ids
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    (expected,) = llm.chat(messages, GREEDY, False)
    assert not caplog.records
    (output,) = llm.chat(messages=messages, sampling_params=GREEDY, chat_template_content_format="auto")
    assert output.token_ids == expected.token_ids
    with pytest.raises(TypeError, match="the third argument is use_tqdm, not token ids; give those as the prompts"):
        llm.generate(question, GREEDY, [[1, 2]])


def test_calls_of_one_forward_pass_take_vllms_arguments(llm):
    params = PoolingParams(dimensions=4)
    (expected,) = llm.embed(["ab"], params, False)
    (output,) = llm.encode(["ab"], params, use_tqdm=False, pooling_task="embed", lora_request=None)
    assert output.outputs.embedding == expected.outputs.embedding and len(output.embedding) == 4
    (cut,) = llm.embed(["abc"], pooling_params=params, use_tqdm=False, truncate_prompt_tokens=2)
    assert cut.outputs.embedding == expected.outputs.embedding
    scores = [
        llm.score("ab", "ac", False, pooling_type="mean"),
        llm.score(text_1="ab", text_2=["ac"], use_tqdm=False, pooling="mean"),
        llm.score(data_1=["ab"], data_2=["ac"], use_tqdm=False, pooling_params=PoolingParams(pooling_type="mean")),
    ]
    assert len({output.outputs.score for [output] in scores}) == 1
    assert llm.embed([], params, False) == [], "no prompts"
    with pytest.raises(ValueError, match="classify needs a model with a classification head"):
        llm.classify([])


def test_as_many_completions_to_choose_from_as_to_return_are_a_neutral_value():
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)
    with pytest.raises(ValueError, match="best_of cannot be 3; ask for n completions"):
        SamplingParams(n=2, best_of=3)


def test_attributes_of_the_engine_are_read_only_and_lead_to_what_to_do(llm):
    engine = llm.llm_engine
    assert engine.model_config.max_model_len == llm.engine.info.max_model_len
    assert engine.model_config.hf_config.vocab_size == engine.model_config.get_vocab_size() == 259
    assert engine.vllm_config.cache_config.block_size == llm.engine.info.kvcache_block_size
    assert engine.tokenizer.tokenizer is engine.get_tokenizer() is llm.get_tokenizer()
    assert engine.tokenizer.encode("ab") == [97, 98] and copy.copy(engine.tokenizer).encode("a") == [97]
    for place, name in ((engine, "tokenizer"), (engine.model_config, "max_model_len"), (engine.tokenizer, "tokenizer")):
        with pytest.raises(AttributeError, match=r"cannot be set; .*set_tokenizer\(\)"):
            setattr(place, name, None)
    with pytest.raises(AttributeError, match=r"no add_request; llm.generate_iter\(\) reads requests as they come"):
        engine.add_request("0", "Hi", GREEDY)
    del llm.llm_engine.model_executor
    assert hasattr(llm.llm_engine, "model_executor")
    for name in ("add_lora", "list_loras", "pin_lora", "remove_lora"):
        with pytest.raises(AttributeError, match=rf"no {name}; pass a LoRARequest as lora_request to a call; see docs"):
            getattr(engine, name)
    request = LoRARequest("a", 1, "a")
    assert engine.get_tokenizer_group().get_lora_tokenizer(request) is llm.get_tokenizer()


def test_another_tokenizer_takes_effect_from_the_next_call_on(tmp_path):
    with LLM(MODEL_DIRECTORY, **SMALL) as llm:
        tokenizer = copy.deepcopy(llm.get_tokenizer())
        tokenizer.chat_template = "{{ messages[0].content }}!"
        llm.set_tokenizer(tokenizer)
        assert llm.render([{"role": "user", "content": "Hi"}]) == "Hi!" and llm.get_tokenizer() is tokenizer
        tokenizer.eos_token = "5"
        llm.set_tokenizer(tokenizer)  # its end-of-sequence id ends completions, and is no stop reason
        (output,) = llm.generate("Q: What is 2 + 3?\nA:", GREEDY, False)
        assert output.token_ids[-1] == tokenizer.eos_token_id == ord("5") and output.outputs[0].stop_reason is None
        with pytest.raises(TypeError, match="set_tokenizer takes one of transformers' tokenizers, not 'gpt2'"):
            llm.set_tokenizer("gpt2")
        assert llm.render([{"role": "user", "content": "Hi"}]) == "Hi!"


@pytest.mark.parametrize("neutral", [{"cache_salt": "x"}, {"multi_modal_data": {}}, {"mm_processor_kwargs": None}])
def test_a_prompt_may_have_neutral_keys_and_no_others(llm, neutral):
    found, typo = llm.generate([{"prompt": "Hi", **neutral}, {"prompt": "Hi", "multi_modal_dta": {}}], GREEDY, 0)
    assert found.error is None and "this one holds 'multi_modal_dta'; leave that out" in typo.error


def test_tags_of_wake_up_are_checked(llm):
    llm.sleep()
    with pytest.raises(ValueError, match='tags must be a list of "weights" and "kv_cache"'):
        llm.wake_up(["zzz"])
    llm.wake_up(["weights"])
    assert not llm.is_sleeping and llm.reset_prefix_cache(reset_running_requests=True) is True
    with pytest.raises(TypeError, match="unknown argument 'tags'"):
        llm.generate("Hi", tags=["weights"])


def test_arguments_that_ask_for_more_are_refused(llm):
    with pytest.raises(TypeError, match=r"^lora_request must be a LoRARequest, or a list .*, not 'x'"):
        llm.generate("Hi", GREEDY, lora_request="x")
    with pytest.raises(ValueError, match=r"lora_request needs LLM\(enable_lora=True\)"):
        llm.generate("Hi", GREEDY, lora_request=LoRARequest("a", 1, "a"))
    with pytest.raises(TypeError, match="unknown argument 'sampling_param'; did you mean sampling_params"):
        llm.generate("Hi", sampling_param=GREEDY)
    with pytest.raises(TypeError, match="prompts is given twice"):
        llm.generate(prompts="Hi", prompt_token_ids=[1])
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, continue_final_message=True)


def test_the_bar_may_be_of_the_callers_making(llm):
    made = []

    class Bar:
        def __init__(self, **options):
            self.options, self.num_done, self.is_closed = options, 0, False
            made.append(self)

        def update(self, number):
            self.num_done += number

        def set_postfix_str(self, text, refresh):
            assert "tok/s" in text

        def close(self):
            self.is_closed = True

    llm.generate(["Hi", "Ho"], GREEDY, Bar)
    (bar,) = made
    assert (bar.options["total"], bar.num_done, bar.is_closed) == (2, 2, True)


def test_a_template_tools_and_documents_reach_the_prompt(llm):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
        "{% for each in documents or [] %}({{ each.title }}){% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    more = {"tools": [{"name": "weather"}], "documents": [{"title": "Tides"}]}
    (output,) = llm.chat(messages, GREEDY, False, chat_template=template, **more)
    assert output.prompt == "<user>Hi<assistant>Ho[weather](Tides)<assistant>"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(messages, GREEDY, False, chat_template=template, **options)
    assert output.prompt == "<user>Hi<assistant>Ho"


def test_a_model_without_a_template_takes_one(tmp_path):
    for path in Path(MODEL_DIRECTORY).iterdir():
        if "template" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(tmp_path, **SMALL) as llm:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        (output,) = llm.chat(messages, GREEDY, False, chat_template=template)
        assert output.prompt == "Hi" and output.error is None
        with pytest.raises(ValueError, match="no chat template; pass chat_template"):
            llm.chat(messages, GREEDY, False)


def test_no_accepted_name_is_ours():
    ours = {*Config.__dataclass_fields__}
    assert not ours & {*ACCEPTED_OPTIONS, *RENAMED_OPTIONS} and ours >= {*RENAMED_OPTIONS.values()}
    assert not ACCEPTED_PARAMETERS.keys() & {*SamplingParams.__dataclass_fields__}


def rows_of_page(table: dict[str, Accepted], any_value: bool) -> list[str]:
    rows = []
    for name, (reason, values, _) in table.items():
        if (values is None) == any_value:
            given = [value for value in values or () if value is not None]
            text = ", ".join(f"`{value!r}`".replace("'", '"') for value in given) or "`None`"
            text = f"`{given[0]}` to `{given[-1]}`" if len(given) > 20 else text
            rows.append(f"| `{name}` | {reason} |" if any_value else f"| `{name}` | {text} | {reason} |")
    return rows


def test_the_page_has_each_keyword_with_its_values_and_reason():
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
    expected = [f"| `{theirs}` | `{ours}` |" for theirs, ours in RENAMED_OPTIONS.items()]
    expected += rows_of_page(ACCEPTED_OPTIONS, True) + rows_of_page(ACCEPTED_OPTIONS, False)
    expected += [f"| `{theirs}` | `{ours}` |" for theirs, ours in RENAMED_PARAMETERS.items()]
    expected += rows_of_page(ACCEPTED_PARAMETERS, True) + rows_of_page(ACCEPTED_PARAMETERS, False)
    expected += rows_of_page(ACCEPTED_STRUCTURED_OUTPUTS, True) + rows_of_page(ACCEPTED_STRUCTURED_OUTPUTS, False)
    expected += [f"| `{theirs}` | `{ours}` |" for theirs, ours in RENAMED_POOLING.items()]
    expected += rows_of_page(ACCEPTED_POOLING, True) + rows_of_page(ACCEPTED_POOLING, False)
    expected += [f"| `{theirs}` | `{ours}` |" for theirs, ours in RENAMED_ARGUMENTS.items()]
    expected += rows_of_page(ACCEPTED_ARGUMENTS, True) + rows_of_page(ACCEPTED_ARGUMENTS, False)
    expected += [f"| `{theirs}` | `{ours}` |" for theirs, ours in RENAMED_LORA.items()]
    for table in (ACCEPTED_LORA, ACCEPTED_BY_RESET):
        expected += rows_of_page(table, True) + rows_of_page(table, False)
    assert [line for line in page.splitlines() if line.startswith("| `")] == expected


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("Hi", GREEDY), {"prompt_token_ids": None}),
        ((None, GREEDY), {"prompt_token_ids": [*b"Hi"]}),
        ((), {"prompts": None, "sampling_params": GREEDY, "prompt_token_ids": [[*b"Hi"]]}),
    ],
    ids=str,
)
def test_none_leaves_room_for_vllms_name_of_the_argument(llm, args, kwargs):
    (output,) = llm.generate(*args, use_tqdm=False, **kwargs)
    assert output.prompt_token_ids == [*b"Hi"] and output.error is None
    with pytest.raises(TypeError, match="prompts is given twice"):
        llm.generate("Hi", prompt_token_ids=[1])
    with pytest.raises(TypeError, match=r"positional|unexpected"):
        llm.generate("Hi", GREEDY, False, None, 4, chat_template_content_format=None)


@pytest.mark.parametrize("value", [None, np.False_, [None, None]], ids=str)
def test_neutral_values_have_many_types(value):
    assert ACCEPTED_OPTIONS["enable_prompt_adapter"].takes(value)
    assert not ACCEPTED_OPTIONS["enable_prompt_adapter"].takes(np.True_)


def test_a_lora_request_takes_vllms_arguments(caplog):
    request = LoRARequest("a", 1, lora_local_path="x", base_model_name="y", load_inplace=True, long_lora_max_len=None)
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("a", 1, "x")
    (record,) = caplog.records
    assert all(
        f"{name} ({ACCEPTED_LORA[name].reason})" in record.getMessage() for name in ("base_model_name", "load_inplace")
    )
    with pytest.raises(TypeError, match="lora_path is given twice"):
        LoRARequest("a", 1, "x", lora_local_path="y")
    for name, value in (("long_lora_max_len", 4096), ("tensorizer_config_dict", {"a": 1})):
        with pytest.raises(ValueError, match=f"^{name} cannot be .*; {re.escape(ACCEPTED_LORA[name].reason)}$"):
            LoRARequest("a", 1, "x", **{name: value})
    with pytest.raises(TypeError, match="unknown argument 'lora_pth'; did you mean lora_path"):
        LoRARequest("a", 1, lora_pth="x")
