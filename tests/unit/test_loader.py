"""Every tensor of a checkpoint is loaded exactly once, and an error names what is wrong with a checkpoint."""

import json
import os
import pickle
import random
import re
from pathlib import Path

import pytest
import torch
from support.family_factory import FAMILIES, save_family_model
from support.model_factory import (
    TINY,
    edit_config,
    make_model,
    read_tensors,
    save_model,
    write_index,
    write_shards,
    write_tensors,
)
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.attention.backend import AttentionShape
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.models.decoder import CausalLM
from nanovllm.models.directory import find_model
from nanovllm.models.loader import expected_tensors, fill_dummy_weights, load_weights
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel

INDEX = "model.safetensors.index.json"


def empty_model(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model of a directory's config, all NaN."""
    config = load_model_config(directory)
    backend = TorchAttention(AttentionShape(1, 1, config.head_dim, dtype, torch.device("cpu")))
    model = CausalLM(config, 64, backend, Parallel(), dtype=dtype, device=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = empty_model(directory, dtype)
    load_weights(model, directory)
    return model


def fused(theirs: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The expected values of our parameter `name`, from transformers' state dict."""
    for ours, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if ours in name:
            return torch.cat([theirs[name.replace(ours, part)] for part in parts])
    if "qk_norm" in name:  # [query and key heads, head_dim], a row for each head
        q_weight, k_weight = (theirs[name.replace("qk_norm", part)] for part in ("q_norm", "k_norm"))
        num_heads, num_kv_heads = (
            theirs[name.replace("qk_norm", part)].shape[0] // len(q_weight) for part in ("q_proj", "k_proj")
        )
        return torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))
    return theirs[name]


def assert_equal_to(model: torch.nn.Module, theirs: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.data, fused(theirs, name), rtol=0, atol=0, check_dtype=False)


def error_of(directory: Path) -> str:
    """The message of the ValueError that loading the directory raises."""
    with pytest.raises(ValueError) as error:
        load(directory)
    return str(error.value)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save_model(tmp_path, seed=2, attention_bias=True, num_hidden_layers=2)
    return tmp_path


# Checkpoints that load


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_loaded_exactly(tmp_path, attention_bias, tied):
    """Parameters start as NaN, so one that the loader forgets shows."""
    model = save_model(tmp_path, seed=2, attention_bias=attention_bias, tie_word_embeddings=tied, num_hidden_layers=3)
    ours = load(tmp_path)
    assert_equal_to(ours, model.state_dict())
    stored = set(read_tensors(tmp_path))
    assert set(expected_tensors(ours)) == stored - ({"lm_head.weight"} if tied else set())
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rounded_once_to_the_dtype_asked_for(tmp_path, stored, wanted):
    """A checkpoint in bfloat16 widens exactly."""
    tensors = make_model(2).state_dict()
    save_model(tmp_path, seed=2)
    tensors = write_tensors(tmp_path, {name: tensor.to(stored) for name, tensor in tensors.items()})
    assert_equal_to(load(tmp_path, wanted), {name: tensor.to(wanted) for name, tensor in tensors.items()})


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_checkpoints_load(checkpoint, with_index):
    """The parts of one merged parameter may be in different files."""
    tensors = read_tensors(checkpoint)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        shards.setdefault(f"model-{number % 3 + 1:05}-of-00003.safetensors", {})[name] = tensor
    write_shards(checkpoint, shards, with_index)
    assert_equal_to(load(checkpoint), tensors)


def test_files_that_the_index_does_not_name_are_not_opened(checkpoint):
    """Repositories hold a second copy of the weights beside the sharded one."""
    tensors = read_tensors(checkpoint)
    write_shards(checkpoint, {"a.safetensors": tensors})
    write_tensors(checkpoint, tensors, "consolidated.safetensors")
    (checkpoint / "broken.safetensors").write_bytes(b"nothing")
    assert_equal_to(load(checkpoint), tensors)


def test_a_whole_file_counts_before_others_and_before_an_old_index(checkpoint, caplog):
    """Mistral's repositories also hold consolidated.safetensors, and saving a model again leaves an old index."""
    tensors = read_tensors(checkpoint)
    write_tensors(checkpoint, {"old": torch.zeros(1)}, "consolidated.safetensors")
    assert_equal_to(load(checkpoint), tensors)
    assert not caplog.records
    write_index(checkpoint, {"old": "consolidated.safetensors"})
    assert_equal_to(load(checkpoint), tensors)
    assert INDEX in caplog.text and "model.safetensors" in caplog.text


def test_links_into_a_cache_are_followed(checkpoint, tmp_path_factory):
    """The hub's cache is a directory of links to files elsewhere; only names in the index are judged."""
    tensors = read_tensors(checkpoint)
    write_shards(checkpoint, {"a.safetensors": tensors})
    snapshot = tmp_path_factory.mktemp("snapshot")
    for path in checkpoint.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert_equal_to(load(snapshot), tensors)


def test_a_tied_model_may_store_its_lm_head_too(tmp_path):
    """Some tools write the tied tensor twice; equal copies are one."""
    save_model(tmp_path, tie_word_embeddings=True)
    tensors = read_tensors(tmp_path)
    assert "lm_head.weight" not in tensors
    write_tensors(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert_equal_to(load(tmp_path), tensors)
    write_shards(
        tmp_path,
        {"a.safetensors": {"lm_head.weight": tensors["model.embed_tokens.weight"]}, "b.safetensors": tensors},
    )
    assert_equal_to(load(tmp_path), tensors)


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_pair_may_be_stored_under_either_name(tmp_path, left_out):
    """transformers takes either; the embedding alone was once the only one here."""
    save_model(tmp_path, tie_word_embeddings=True)
    tensors = read_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if name != left_out})
    model = load(tmp_path)
    assert_equal_to(model, AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    assert_equal_to(model, tensors)


PREFIXED = {
    "no prefix": lambda name: name.removeprefix("model."),
    "one more": lambda name: f"model.{name}",
    "some without": lambda name: name.replace("model.norm.", "norm."),
    "head within": lambda name: f"model.{name.removeprefix('model.')}",
    "a wrapper": lambda name: f"language_model.{name}",
    "within the model": lambda name: name.replace("model.", "model.language_model."),
    "another name": lambda name: name.replace("model.", "transformer."),
    "compiled, in ranks": lambda name: f"module._orig_mod.{name}",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", PREFIXED)
def test_names_may_have_any_prefix(tmp_path, kind, tied):
    """transformers takes one "model." more or less. Other prefixes are of models that wrap ours."""
    expected = save_model(tmp_path, tie_word_embeddings=tied).state_dict()
    write_tensors(tmp_path, {PREFIXED[kind](name): tensor for name, tensor in read_tensors(tmp_path).items()})
    assert_equal_to(load(tmp_path), expected)
    if kind in ("no prefix", "one more", "some without", "head within"):
        assert_equal_to(load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_without_the_prefix(tmp_path, family):
    """A tied model may also have the head alone."""
    options = FAMILIES[family][2](random.Random(family)) | {"tie_word_embeddings": True}
    save_family_model(tmp_path, family, options)
    expected = dict(load(tmp_path).named_parameters())
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(tmp_path).items()}
    write_tensors(tmp_path, {**tensors, "lm_head.weight": tensors["embed_tokens.weight"]})
    found = dict(load(tmp_path).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_decoder_that_was_saved_alone_runs(tmp_path):
    """transformers writes it without "model.", without an LM head, and with another architecture."""
    model = make_model(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in read_tensors(tmp_path) and load_model_config(tmp_path).tie_word_embeddings
    prompt = [5, 17, 3]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    with LLM(str(tmp_path), device="cpu") as llm:
        (ours,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert ours.token_ids == theirs[0, len(prompt) :].tolist()


# Checkpoints that do not load


def test_a_tensor_under_two_names_is_named_with_both(checkpoint):
    tensors = read_tensors(checkpoint)
    write_tensors(checkpoint, {**tensors, "model.lm_head.weight": tensors["lm_head.weight"]})
    message = error_of(checkpoint)
    assert "tensor lm_head.weight in " in message and "tensor model.lm_head.weight in " in message
    assert message.endswith("are the same tensor; keep one of them")


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[3, 1] += 1e-3
    return changed


@pytest.mark.parametrize(
    "make_head",
    [other_values, lambda tensor: tensor[:-1], lambda tensor: tensor.to(torch.int32), lambda tensor: tensor.T],
    ids=["values", "shorter", "integers", "transposed"],
)
def test_a_tied_model_with_another_lm_head_is_an_error(tmp_path, make_head):
    """Dropping it silently would run another model than the trained one."""
    save_model(tmp_path, tie_word_embeddings=True)
    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, {**tensors, "lm_head.weight": make_head(tensors["model.embed_tokens.weight"])})
    message = error_of(tmp_path)
    assert "lm_head.weight" in message and "model.safetensors" in message and "tie_word_embeddings" in message


NAMES = [
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.1.self_attn.o_proj.bias",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.self_attn.q_norm.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(checkpoint, name):
    """It may be a part of a merged parameter, half of which would be uninitialised memory."""
    tensors = read_tensors(checkpoint)
    del tensors[name]
    write_tensors(checkpoint, tensors)
    message = error_of(checkpoint)
    assert name in message and str(checkpoint) in message and message.startswith("a tensor is missing")


def test_many_missing_tensors_are_counted_and_not_all_listed(checkpoint):
    edit_config(checkpoint, num_hidden_layers=9, remove=("layer_types",))
    message = error_of(checkpoint)
    assert len(message) < 600 and "model.layers.2." in message and str(7 * 15) in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.rotary_emb.cos", "weight", "lm_head",
        "model.layers.0.norm.weight", "vision_tower.norm.weight", "model.model.norm.weight", "vision.lm_head.weight",
    ],
)  # fmt: skip
def test_an_unexpected_tensor_is_named(checkpoint, name):
    """If there are more layers than in the config, the config belongs to another model. So do tensors behind another
    prefix than most have."""
    write_tensors(checkpoint, {**read_tensors(checkpoint), name: torch.zeros(2)})
    message = error_of(checkpoint)
    assert f"unexpected tensor {name} " in message and "model.safetensors" in message


def test_a_bias_that_the_config_denies_is_unexpected(checkpoint):
    """If it were dropped silently, the model would run without it."""
    edit_config(checkpoint, attention_bias=False)
    assert re.search(r"unexpected tensor model\.layers\.\d\.self_attn\.\w_proj\.bias ", error_of(checkpoint))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["longer", "shorter", "scalar", "more_dimensions"])
def test_a_misshapen_tensor_is_named_with_both_shapes(checkpoint, name, change):
    """Broadcasting or slicing would accept most of these."""
    tensors = read_tensors(checkpoint)
    tensor = tensors[name]
    tensors[name] = {
        "longer": torch.cat((tensor, tensor[:1])),
        "shorter": tensor[:-1],
        "scalar": torch.tensor(1.0),
        "more_dimensions": tensor[None],
    }[change]
    write_tensors(checkpoint, tensors)
    message = error_of(checkpoint)
    assert f"tensor {name} in " in message and "model.safetensors" in message
    assert str(list(tensor.shape)) in message and str(list(tensors[name].shape)) in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_tensor_of_integers_is_named(checkpoint, dtype):
    """Quantised weights without their scales would load as numbers of the wrong size."""
    tensors = read_tensors(checkpoint)
    tensors[NAMES[1]] = tensors[NAMES[1]].to(dtype)
    write_tensors(checkpoint, tensors)
    message = error_of(checkpoint)
    assert NAMES[1] in message and "model.safetensors" in message and "floating-point" in message


@pytest.mark.parametrize("with_index", [True, False])
def test_a_tensor_in_two_files_is_named_with_both(checkpoint, with_index):
    """The loader cannot know which of the two is right."""
    tensors = read_tensors(checkpoint)
    shards = {"a.safetensors": tensors, "b.safetensors": {NAMES[2]: tensors[NAMES[2]]}}
    write_shards(checkpoint, shards, with_index)
    if with_index:
        write_index(checkpoint, {"x": "a.safetensors", "y": "b.safetensors"})
    message = error_of(checkpoint)
    assert all(part in message for part in (NAMES[2], "a.safetensors", "b.safetensors"))


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -4096, -1])
def test_a_truncated_file_is_named(checkpoint, kept):
    """An interrupted download may end at the end of some tensor."""
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in error_of(checkpoint)


@pytest.mark.parametrize("content", [b"not safetensors at all", b"\xff" * 64, b"version https://git-lfs.github.com/"])
def test_a_file_of_something_else_is_named(checkpoint, content):
    """It may be a pointer of git-lfs or an error page under the right name."""
    path = checkpoint / "model.safetensors"
    path.write_bytes(content)
    assert str(path) in error_of(checkpoint)


def test_a_directory_under_a_files_name_is_named(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").mkdir()
    assert str(checkpoint / "model.safetensors") in error_of(checkpoint)


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


def test_a_pipe_is_no_index(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    os.mkfifo(checkpoint / INDEX)
    assert f"{INDEX} is not a regular file" in error_of(checkpoint)


def test_weights_of_eight_bits_are_refused(checkpoint):
    """They are quantized, and no scale would be read."""
    tensors = read_tensors(checkpoint)
    tensors[NAMES[1]] = tensors[NAMES[1]].to(torch.float8_e4m3fn)
    write_tensors(checkpoint, tensors)
    assert "float8_e4m3fn; only floating-point weights of 16 bits" in error_of(checkpoint)


def test_nothing_is_ever_unpickled(checkpoint, monkeypatch):
    """pytorch_model.bin is a program; a directory with nothing else holds no weights."""
    (checkpoint / "model.safetensors").unlink()
    monkeypatch.chdir(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "no .safetensors file" in error_of(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    assert str(checkpoint / "model.safetensors") in error_of(checkpoint)
    assert not (checkpoint / "unpickled").exists()


def test_stored_frequencies_are_passed_over(checkpoint):
    """Llama 2's checkpoints hold them for every layer."""
    tensors = read_tensors(checkpoint)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors(checkpoint, {**tensors, name: torch.ones(8)})
    assert_equal_to(load(checkpoint), tensors)


# The index


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "sub/../../outside.safetensors", "sub/inside.safetensors", "absolute", "..", ""]
)
def test_the_index_may_not_leave_the_directory(tmp_path, name):
    """A checkpoint from the net must not choose files to open, not even a file that would load."""
    directory = tmp_path / "model"
    save_model(directory)
    tensors = read_tensors(directory)
    write_tensors(tmp_path, tensors, "outside.safetensors")
    (directory / "sub").mkdir()
    write_tensors(directory / "sub", tensors, "inside.safetensors")
    if name == "absolute":
        name = str(tmp_path / "outside.safetensors")
    write_index(directory, dict.fromkeys(tensors, name))
    message = error_of(directory)
    assert repr(name) in message and INDEX in message


def test_the_index_names_only_safetensors_files(checkpoint):
    """The content of other files does not matter."""
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    write_index(checkpoint, {"x": "pytorch_model.bin"})
    assert "pytorch_model.bin" in error_of(checkpoint)


def test_a_file_that_the_index_names_must_be_there(checkpoint):
    write_index(checkpoint, {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"})
    message = error_of(checkpoint)
    assert "model-00002-of-00002.safetensors" in message and INDEX in message


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "3", "null", '"text"', "{}", '{"weight_map": 3}', '{"weight_map": null}', '{"weight_map": []}',
        '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["model.safetensors"]}}',
        '{"weight_map": {"a": null, "b": "model.safetensors"}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_malformed_index_is_named(checkpoint, content):
    """Reading the existing files instead would hide the broken download."""
    path = checkpoint / INDEX
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert INDEX in error_of(checkpoint)


def test_an_index_of_nothing_leaves_everything_missing(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    write_index(checkpoint, {})
    assert "missing" in error_of(checkpoint)


# Dummy weights


def dummy_config(directory: Path) -> None:
    fields = {**TINY, "architectures": ["Qwen3ForCausalLM"], "attention_bias": True}
    (directory / "config.json").write_text(json.dumps(fields))


def test_dummy_weights_need_only_a_config_and_are_reproducible(tmp_path):
    """Benchmarks of a large model need no download; two runs must measure the same thing."""
    dummy_config(tmp_path)
    tokens = []
    for seed in (0, 0, 1):
        with LLM(str(tmp_path), device="cpu", load_format="dummy", seed=seed) as llm:
            output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
            tokens.append((output.error, output.token_ids))
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] is None and len(tokens[0][1]) == 20


def test_dummy_weights_are_finite_small_and_cover_every_parameter(tmp_path):
    dummy_config(tmp_path)
    first, second, third = (empty_model(tmp_path) for _ in range(3))
    for model, seed in ((first, 0), (second, 0), (third, 2**64 - 1)):
        fill_dummy_weights(model, seed)
    for (name, one), two, three in zip(first.named_parameters(), second.parameters(), third.parameters(), strict=True):
        assert one.isfinite().all() and torch.equal(one, two), name
        if name.endswith("norm.weight"):
            assert (one == 1).all()
        else:
            assert 0 < one.abs().max() < 1 and not torch.equal(one, three), name


def test_without_weights_the_default_load_format_says_so(tmp_path):
    dummy_config(tmp_path)
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        LLM(str(tmp_path), device="cpu")


# Finding a model


@pytest.fixture
def hub(monkeypatch):
    """A hub without a network, which records the calls and returns `hub.answer`."""

    class Hub:
        calls: list[tuple] = []
        answer: object = OSError("no such repository")

        def snapshot_download(self, *args, **kwargs):
            self.calls.append((args, kwargs))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    hub = Hub()
    hub.calls = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    return hub


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch, hub):
    """This holds even if its relative name looks like a name of the hub."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model(str(tmp_path), None) == tmp_path
    assert find_model("org/name", None) == Path("org/name")
    assert find_model("~/org", None) == tmp_path / "org"
    assert hub.calls == []


@pytest.mark.parametrize("name", ["./model", "../model", "/no/such/model", "~/no/such/model", "a/b/c", "file"])
def test_what_can_only_be_a_directory_is_never_asked_of_the_hub(tmp_path, monkeypatch, hub, name):
    """A mistyped path must not become a request to the net."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError) as error:
        find_model(name, None)
    assert repr(name) in str(error.value) and "not a directory" in str(error.value)
    assert hub.calls == []


@pytest.mark.parametrize("failure", [OSError("no network"), ValueError("bad name"), RuntimeError("404")])
@pytest.mark.parametrize("name", ["org/name", "name"])
def test_a_name_that_the_hub_does_not_give_is_an_error(tmp_path, monkeypatch, hub, name, failure):
    """For each error of the client, the message names the model and the reason."""
    monkeypatch.chdir(tmp_path)
    hub.answer = failure
    with pytest.raises(ValueError) as error:
        find_model(name, "main")
    assert all(part in str(error.value) for part in (repr(name), type(failure).__name__, str(failure)))
    with pytest.raises(ValueError, match=str(failure)):
        LLM(name, device="cpu")


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_hub_name_fetches_only_what_is_needed(tmp_path, monkeypatch, hub, with_weights):
    """It fetches the given revision and no pickled weights. Dummy weights need no weights."""
    model_dir = tmp_path / "cache"
    save_model(model_dir)
    monkeypatch.chdir(tmp_path)
    hub.answer = str(model_dir)
    assert find_model("org/name", "v1.0", with_weights) == model_dir
    ((args, kwargs),) = hub.calls
    assert args == ("org/name",) and kwargs["revision"] == "v1.0"
    patterns = kwargs["allow_patterns"]
    assert "*.json" in patterns and ("*.safetensors" in patterns) == with_weights
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_llm_of_a_hub_name_runs_what_was_fetched(tmp_path, monkeypatch, hub, load_format):
    """It fetches the files once."""
    model_dir = tmp_path / "cache"
    save_model(model_dir)
    if load_format == "dummy":
        (model_dir / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    hub.answer = str(model_dir)
    with LLM("org/name", revision="abc", load_format=load_format, device="cpu") as llm:
        output = llm.generate([1, 2], SamplingParams(max_tokens=3), use_tqdm=False)[0]
    assert len(output.token_ids) == 3
    ((_, kwargs),) = hub.calls
    assert kwargs["revision"] == "abc"
    assert ("*.safetensors" in kwargs["allow_patterns"]) == (load_format == "auto")
