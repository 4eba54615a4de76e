"""Engines with weights in FP8: checkpoints of each layout, schedules, new weights, and what is refused.

A checkpoint stands for a model in float32 that has the dequantized weights and rounds the inputs of its linear layers
as FP8 does. Completions are compared with those of this model and not with transformers': on a CPU transformers
dequantizes such checkpoints (quant_method "fp8" only with accelerate, compressed-tensors only with the package of that
name), and then it does not round the inputs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_factory import save_family_model
from support.fp8_factory import (
    CHANNEL,
    LAYOUTS,
    PROMPTS,
    Layout,
    assert_alike,
    block_layout,
    blockwise,
    changed_copy,
    completed,
    completions,
    compressed,
    open_llm,
    quantized_copy,
    round_inputs,
)
from support.long import some
from support.model_factory import read_tensors, save_model, write_tensors
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM
from nanovllm.layers.context import LayerContext
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.quantization import BlockFp8, ChannelFp8
from nanovllm.models.loader import load_weights
from nanovllm.ops.grouped_mlp import ExpertWeights, grouped_mlp
from nanovllm.ops.quantize import E4M3
from nanovllm.ops.route import Routes

# The last block of 128 inputs is cut off.
SIZES = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "model"
    directory.mkdir()
    save_model(directory, seed=5, **SIZES)
    return directory


# Checkpoints


def test_weights_that_come_in_fp8_are_those_that_we_make(plain_model, tmp_path):
    directory = quantized_copy(plain_model, tmp_path / "fp8")
    assert completions(directory) == completions(plain_model, quantization="fp8")
    assert completions(directory, quantization="fp8") == completions(directory)


OF_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "phi3": {"pad_token_id": 0},
    "gemma3": {"sliding_window": 8, "pad_token_id": 0},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2, "pad_token_id": 0},
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_5": OF_DELTA_NET,
    "qwen3_next": {
        **OF_DELTA_NET,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
}


def save_family(directory: Path, family: str, **options: Any) -> Path:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": rope, "sliding_attention": rope}
    common = {
        "vocab_size": 61, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "rope_parameters": ropes if family == "gemma3" else rope,
    }  # fmt: skip
    head_dim = {} if family == "phi3" else {"head_dim": 16}
    directory.mkdir()
    save_family_model(directory, family, {**common, **head_dim, **FAMILY_OPTIONS[family], **options}, seed=3)
    return directory


def assert_stands_for(
    directory: Path, whole: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1, **options: Any
) -> None:
    """Asserts that the checkpoint completes as the float32 model `whole` does when it rounds its layers' inputs."""
    found = completions(directory, tensor_parallel_size=num_ranks, **options)
    unrounded = completions(whole)
    round_inputs(monkeypatch, layout, num_ranks)
    expected = completions(whole)
    assert_alike(found, expected, tolerance=0.02)
    # The rounding makes the difference.
    differences = [abs(a - b) for (_, one), (_, other) in zip(expected, unrounded, strict=True)
                   for a, b in zip(one[:1], other[:1], strict=True)]  # fmt: skip
    assert max(differences) > 0.05


@pytest.mark.parametrize("layout", ["channel", "tensor", "block"])
def test_a_checkpoint_completes_as_the_model_that_it_stands_for(plain_model, tmp_path, monkeypatch, layout):
    directory = quantized_copy(plain_model, tmp_path / "fp8", LAYOUTS[layout])
    whole = changed_copy(plain_model, tmp_path / "whole", LAYOUTS[layout].whole)
    assert_stands_for(directory, whole, LAYOUTS[layout], monkeypatch)


@pytest.mark.grid(1)
@pytest.mark.parametrize("layout", ["channel", "tensor", "small block"])
@pytest.mark.parametrize("family", FAMILY_OPTIONS)
def test_so_do_those_of_other_families(tmp_path, monkeypatch, family, layout):
    """They have biases, tied embeddings, merged projections, norms after blocks, or experts."""
    plain = save_family(tmp_path / "plain", family)
    directory = quantized_copy(plain, tmp_path / "fp8", LAYOUTS[layout])
    whole = changed_copy(plain, tmp_path / "whole", LAYOUTS[layout].whole)
    assert_stands_for(directory, whole, LAYOUTS[layout], monkeypatch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe"])
def test_kernels_compute_what_the_plain_layers_do(tmp_path, family):
    """A norm over all heads needs queries and keys whose scales are applied. A shared expert quantizes its inputs
    itself, because the other experts take plain ones."""
    plain = save_family(tmp_path / "plain", family, num_hidden_layers=1)
    found = []
    for backend in ("torch", "triton"):
        options = {"attention_backend": backend, "quantization": "fp8", "kvcache_block_size": 16}
        with open_llm(plain, **options) as llm:
            found.append(completed(llm, PROMPTS[1:3]))
    assert_alike(*found, tolerance=0.02)


@pytest.mark.parametrize(
    ("family", "layout", "ignored", "skipped"),
    [
        ("llama", "channel", ["lm_head", "model.layers.1.self_attn.o_proj"], ["layers.1.self_attn.o_proj"]),
        ("llama", "channel", ["re:.*mlp.*"], [".mlp."]),
        ("llama", "small block", ["self_attn"], [".self_attn."]),
        ("llama", "small block", ["model.layers.0"], [".layers.0."]),
        ("llama", "small block", ["mlp.gate"], []),
        ("mixtral", "channel", ["re:.*block_sparse_moe.*", "lm_head"], [".block_sparse_moe."]),
        ("qwen3_moe", "channel", [f"model.layers.1.mlp.experts.{number}.{name}_proj" for number in range(5)
                                  for name in ("gate", "up", "down")], [".layers.1.mlp.experts"]),
    ],
)  # fmt: skip
def test_ignored_layers_stay_as_they_are(tmp_path, monkeypatch, family, layout, ignored, skipped):
    plain, of_layout = save_family(tmp_path / "plain", family), LAYOUTS[layout]

    def stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: weight} if any(part in name for part in skipped) else of_layout.stored(name, weight)

    key = "ignore" if layout == "channel" else "modules_to_not_convert"
    directory = changed_copy(plain, tmp_path / "some", stored, quantization_config=of_layout.config | {key: ignored})
    with open_llm(directory) as llm:
        found = dict(llm.engine.runner.program.model.named_parameters())
        completed(llm)
    in_fp8 = {name for name, parameter in found.items() if parameter.dtype == E4M3}
    ours = [part.replace("block_sparse_moe", "mlp").replace("mlp.experts", "mlp.") for part in skipped]
    assert in_fp8 and not any(part in name for part in ours for name in in_fp8)
    with open_llm(quantized_copy(plain, tmp_path / "all", of_layout)) as llm:
        all_fp8 = {name for name, it in llm.engine.runner.program.model.named_parameters() if it.dtype == E4M3}
    assert in_fp8 == {name for name in all_fp8 if not any(part in name for part in ours)}


# Dummy weights


@pytest.mark.parametrize("layout", [None, "channel", "block"])
def test_dummy_weights_in_fp8_are_as_large_as_other_ones(plain_model, tmp_path, layout):
    directory, options = plain_model, {"quantization": "fp8"}
    if layout is not None:
        directory, options = quantized_copy(plain_model, tmp_path / "fp8", LAYOUTS[layout]), {}
    with open_llm(directory, load_format="dummy", **options) as llm:
        assert len(completed(llm)) == len(PROMPTS)
        weights = llm.engine.runner.program.model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
        [scales] = [
            parameter for name, parameter in llm.engine.runner.program.model.named_parameters()
            if name.startswith("model.layers.0.mlp.gate_up_proj.weight_scale")
        ]  # fmt: skip
        assert weights.dtype == E4M3 and scales.dtype == torch.float32
        assert (weights.float().std() * scales.mean()).item() == pytest.approx(0.02, rel=0.05)


# Schedules


@pytest.fixture(scope="module")
def expected(plain_model) -> list:
    return completions(plain_model, quantization="fp8", kvcache_block_size=4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"num_kvcache_blocks": 12, "max_model_len": 40},
        {"enable_prefix_caching": False, "overlap": False},
        {"attention_backend": "torch"},
    ],
    ids=["chunks", "one at a time", "preemption", "no prefixes", "plain attention"],
)
def test_the_schedule_changes_nothing(plain_model, expected, options):
    with open_llm(plain_model, quantization="fp8", kvcache_block_size=4, **options) as llm:
        assert_alike(completed(llm), expected, tolerance=0.02)
        if "num_kvcache_blocks" in options:
            assert llm.metrics()["num_preemptions"] > 0
        # Now the prompts' beginnings are cached.
        assert_alike(completed(llm, PROMPTS[::-1])[::-1], expected, tolerance=0.02)
        if options.get("enable_prefix_caching", True):
            assert llm.metrics()["num_cached_prompt_tokens"] > 0


# Ranks


@pytest.mark.parametrize("layout", some(["channel", "tensor", "small block"], "channel"))
@pytest.mark.parametrize("family", some(["llama", "phi3", "gemma3"], "phi3"))
def test_two_ranks_complete_as_one_but_for_the_scales_of_inputs(tmp_path, monkeypatch, family, layout):
    """Each rank rounds its part of a row-parallel layer's inputs, with a scale of its own unless blocks have theirs."""
    plain = save_family(tmp_path / "plain", family, intermediate_size=128)
    directory = quantized_copy(plain, tmp_path / "fp8", LAYOUTS[layout])
    whole = changed_copy(plain, tmp_path / "whole", LAYOUTS[layout].whole)
    assert_stands_for(directory, whole, LAYOUTS[layout], monkeypatch, num_ranks=2)


@pytest.mark.parametrize("family", some(["llama", "phi3", "gemma3"], "phi3"))
def test_two_ranks_quantize_their_parts_of_the_weights(tmp_path, monkeypatch, family):
    """So a channel of a row-parallel layer has one scale per rank."""
    plain = save_family(tmp_path / "plain", family, intermediate_size=128)

    def whole(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = weight.chunk(2 if "o_proj" in name or "down_proj" in name else 1, 1)
        return {name: torch.cat([CHANNEL.whole(name, part)[name] for part in parts], 1)}

    stands_for = changed_copy(plain, tmp_path / "whole", whole)
    assert_stands_for(plain, stands_for, CHANNEL, monkeypatch, num_ranks=2, quantization="fp8")


def test_two_ranks_hold_half_of_each_expert(tmp_path):
    plain = save_family(tmp_path / "plain", "qwen3_moe", moe_intermediate_size=128)
    directory = quantized_copy(plain, tmp_path / "fp8", block_layout(8, 32))
    assert_alike(completions(directory, tensor_parallel_size=2), completions(directory), tolerance=1e-3)


def test_blocks_that_ranks_cannot_divide_are_named(plain_model, tmp_path):
    directory = quantized_copy(plain_model, tmp_path / "fp8", block_layout(128, 128))
    with pytest.raises(ValueError, match=r"blocks of 128 × 128: .* whole blocks, but has 64 of 128.*tensor_par"):
        completions(directory, tensor_parallel_size=2)


def test_blocks_that_a_projection_would_begin_within_are_named(plain_model, tmp_path):
    directory = quantized_copy(plain_model, tmp_path / "fp8", block_layout(96, 64))
    with pytest.raises(ValueError, match=r"blocks of 96 × 64: .*whole blocks.*behind 256 rows of other projections"):
        completions(directory)


# New weights


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("other") / "model"
    directory.mkdir()
    save_model(directory, seed=6, **SIZES)
    return directory


@pytest.mark.parametrize("num_ranks", some([1, 2], 1))
def test_new_weights_are_quantized_again(plain_model, other_model, num_ranks):
    """A bad update leaves the old ones; a sleep leaves no trace."""
    options = {"quantization": "fp8", "tensor_parallel_size": num_ranks}
    before, after = completions(plain_model, **options), completions(other_model, **options)
    assert before != after
    given = {name: tensor.bfloat16() for name, tensor in read_tensors(other_model).items()}
    bad = given | {"model.layers.1.mlp.down_proj.weight": torch.zeros(3, 3)}
    with open_llm(plain_model, **options) as llm:
        with pytest.raises(ValueError, match="down_proj"):
            llm.update_weights(bad)
        with pytest.raises(ValueError, match=r"float8_e4m3fn; only floating-point weights of 16 bits"):
            llm.update_weights({name: tensor.to(E4M3) for name, tensor in given.items() if "down" in name})
        with pytest.raises(ValueError, match="no such parameter"):
            llm.update_weights({"model.layers.0.mlp.down_proj.weight_scale": torch.ones(192, 1)})
        assert completed(llm) == before
        llm.update_weights(read_tensors(other_model))
        assert completed(llm) == after
        llm.sleep(1)
        llm.wake_up()
        assert completed(llm) == after
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(read_tensors(plain_model))
        assert completed(llm) == before


def test_a_part_of_a_fused_layer_is_quantized_alone(plain_model, other_model, tmp_path):
    second = read_tensors(other_model)
    given = {name: tensor for name, tensor in second.items() if "k_proj" in name or "up_proj" in name}
    mixed = changed_copy(plain_model, tmp_path / "mixed", lambda name, weight: {name: given.get(name, weight)})
    with open_llm(plain_model, quantization="fp8") as llm:
        llm.update_weights(given)
        assert completed(llm) == completions(mixed, quantization="fp8")


@pytest.mark.parametrize("layout", ["channel", "tensor", "block"])
def test_a_checkpoint_in_fp8_is_updated_in_its_own_layout(plain_model, other_model, tmp_path, layout):
    first = quantized_copy(plain_model, tmp_path / "first", LAYOUTS[layout])
    second = quantized_copy(other_model, tmp_path / "second", LAYOUTS[layout])
    with open_llm(first) as llm:
        with pytest.raises(ValueError, match=r"float32, but quantization_config in config.json says float8_e4m3fn"):
            llm.update_weights(read_tensors(other_model))
        llm.update_weights(read_tensors(second))
        assert completed(llm) == completions(second)


def test_loading_never_holds_a_second_copy(tmp_path):
    """At most, loading holds the model in FP8 and the memory that quantizing one tensor takes."""
    save_model(tmp_path, seed=1, **SIZES | {"num_hidden_layers": 16})
    with open_llm(tmp_path, quantization="fp8") as llm:
        model = llm.engine.runner.program.model
        largest = max(module.weight.numel() for module in model.modules() if hasattr(module, "format"))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            load_weights(model, tmp_path)
    changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    of_file, *changes = changes  # the file is mapped, not read
    assert of_file == (tmp_path / "model.safetensors").stat().st_size
    held = torch.tensor(changes).cumsum(0)
    assert len(changes) > 200 and held.max() <= 20 * largest < num_bytes / 2


# How exact products are


def test_products_err_as_the_rounding_of_their_inputs_explains():
    """Each input errs by at most half a unit of e4m3, and far less in the mean, where errors cancel."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator) for size in ((40, 500), (300, 500)))
    x *= torch.logspace(-3, 3, 40)[:, None]
    context = LayerContext(torch.float32, torch.device("cpu"))
    for layout, make in ((CHANNEL, ChannelFp8), (block_layout(128, 128), BlockFp8)):
        values, scales = layout.quantize(weight)
        block = layout.block if make is BlockFp8 else None
        number_format = make(Fp8Config("weight_scale", block), context)
        scales = scales.reshape(number_format.scales_shape(*weight.shape))
        found = number_format.multiply(x, values, scales, None)
        whole = layout.whole("", weight)[""]
        error = found - x @ whole.T
        peaks = x.abs().amax(1, keepdim=True)
        limit = (x.abs() / 16 + peaks / 448 / 1024) @ whole.abs().T
        assert (error.abs() <= 1.001 * limit).all()
        # An input's error is in the mean at most a 27th of the input; errors of a sum's inputs are independent.
        of_rows = error.pow(2).mean(1).sqrt() / (x.pow(2) @ whole.pow(2).T).mean(1).sqrt()
        assert (of_rows > 0.015).all() and (of_rows < 1 / 27).all()
        bias = torch.randn(300, generator=generator)
        torch.testing.assert_close(number_format.multiply(x, values, scales, bias), found + bias)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("layout", ["channel", "block", "small block"])
def test_experts_multiply_with_what_their_weights_stand_for(layout, fused):
    """Their inputs are not rounded, so this is exact but for float32."""
    generator = torch.Generator().manual_seed(0)
    num_experts, size, hidden_size, of_layout = 3, 136, 160, LAYOUTS[layout]
    x = torch.randn((7, hidden_size), generator=generator)
    routes = Routes(torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [0, 1], [1, 2], [0, 2]]), torch.rand(7, 2))
    given, whole = [], []
    for shape in ((2 * size, hidden_size), (hidden_size, size)):
        weights = [torch.randn(shape, generator=generator) / 12 for _ in range(num_experts)]
        quantized = [of_layout.quantize(weight) for weight in weights]
        values, scales = (torch.stack(parts) for parts in zip(*quantized, strict=True))
        rows, columns = of_layout.block
        given.append(ExpertWeights(values, scales, rows, columns or shape[1]))
        whole.append(ExpertWeights(torch.stack([of_layout.whole("", weight)[""] for weight in weights])))
    found = grouped_mlp(x, routes, *given, use_kernels=fused)
    torch.testing.assert_close(found, grouped_mlp(x, routes, *whole), rtol=1e-4, atol=1e-4)


# Refused checkpoints and options


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is neither"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' is neither"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is neither.*take weights that are not quantized"),
        ({"load_in_4bit": True}, "quant_method None is neither"),
        ("fp8", "neither"),
        (blockwise(weight_block_size=None), "weight_block_size must be two numbers"),
        (blockwise(weight_block_size=[128]), "weight_block_size must be two numbers"),
        (blockwise(weight_block_size=[128, 0]), "weight_block_size must be two numbers"),
        (blockwise(weight_block_size=[128, 100]), r"the second a multiple of 32, not \[128, 100\]"),
        (blockwise(activation_scheme="static"), "activation_scheme must be dynamic"),
        (blockwise(fmt="e5m2"), "fmt must be e4m3, not 'e5m2'"),
        (blockwise(modules_to_not_convert=[1]), "must be a list of layers' names"),
        (compressed(format="pack-quantized"), "format 'pack-quantized'"),
        (compressed("group"), "strategy must be channel or tensor"),
        (
            compressed(kv_cache_scheme={"num_bits": 8}),
            'kv_cache_scheme asks for .*; kv_cache_dtype="fp8" computes its own',
        ),
        (compressed(transform_config={"config_groups": {}}), "transform_config is set"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is set"),
        (compressed(ignore=["re:("]), "not a regular expression"),
        (compressed(config_groups={}), "config_groups must hold one group"),
        (compressed(ignore=["model.layers.0.self_attn.q_proj"]), "some of .*q_proj.* are in FP8 and some are not"),
    ],
)
def test_other_quantizations_are_named(plain_model, tmp_path, config, message):
    directory = changed_copy(plain_model, tmp_path / "other", CHANNEL.stored, quantization_config=config)
    with pytest.raises(ValueError, match=message):
        completions(directory)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_small_projections_of_a_delta_net_in_fp8_are_named(tmp_path, family):
    """quantization="fp8" leaves them as they are."""
    plain = save_family(tmp_path / "plain", family)
    with pytest.raises(ValueError, match=r"in_proj_b?a is in FP8; nanovllm reads them only in 16 or 32 bits"):
        completions(quantized_copy(plain, tmp_path / "fp8", ignore=["lm_head"]))
    if family == "qwen3_5":
        for name in ("in_proj_a", "in_proj_b"):
            with pytest.raises(ValueError, match="is in FP8; nanovllm reads them only"):
                completions(quantized_copy(plain, tmp_path / name, ignore=["lm_head", f"re:.*{name}$"]))
    with open_llm(plain, quantization="fp8") as llm:
        found = dict(llm.engine.runner.program.model.named_parameters())
    in_fp8 = {
        name.rsplit(".", 2)[1] for name, weight in found.items() if "linear_attn" in name and weight.dtype == E4M3
    }
    assert in_fp8 == {"in_proj_qkvz", "out_proj"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("targets",), ["Linear", "Embedding"], "targets must be"),
        (("format",), "int-quantized", "a group's format 'int-quantized'"),
        (("output_activations",), {"num_bits": 8}, "output_activations are set"),
        (("weights", "num_bits"), 4, "weights must be symmetric floats of 8 bits"),
        (("weights", "type"), "int", "weights must be symmetric floats of 8 bits"),
        (("input_activations", "symmetric"), False, "input_activations must be symmetric floats"),
        (("input_activations",), None, "a group must have weights and input_activations"),
        (("input_activations", "strategy"), "tensor", "input_activations must be dynamic with the strategy token"),
        (("input_activations", "dynamic"), False, "input_activations must be dynamic with the strategy token"),
    ],
)
def test_other_groups_of_compressed_tensors_are_named(plain_model, tmp_path, path, value, message):
    config = compressed()
    part = config["config_groups"]["group_0"]
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    directory = changed_copy(plain_model, tmp_path / "other", CHANNEL.stored, quantization_config=config)
    with pytest.raises(ValueError, match=message):
        completions(directory)


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("channel", lambda all_: all_.pop(f"{O_PROJ}_scale"), f"a tensor is missing .*{O_PROJ}_scale"),
        ("block", lambda all_: all_.pop(f"{O_PROJ}_scale_inv"), f"a tensor is missing .*{O_PROJ}_scale_inv"),
        ("channel", lambda all_: all_.update({f"{O_PROJ}_scale": torch.ones(191, 1)}),
         rf"{O_PROJ}_scale in .* has shape \[191, 1\], the model needs \[192, 1\]"),
        ("tensor", lambda all_: all_.update({f"{O_PROJ}_scale": torch.ones(2)}),
         rf"{O_PROJ}_scale in .* has shape \[2\], the model needs \[1\]"),
        ("block", lambda all_: all_.update({f"{O_PROJ}_scale_inv": torch.ones(1, 2)}),
         rf"{O_PROJ}_scale_inv in .* has shape \[1, 2\], the model needs \[2, 2\]"),
        ("channel", lambda all_: all_.update({O_PROJ: torch.ones(192, 256)}),
         f"{O_PROJ} in .* is torch.float32, but quantization_config"),
        ("channel", lambda all_: all_.update({f"{O_PROJ}_scale": torch.ones(192, 1).to(E4M3)}),
         f"{O_PROJ}_scale in .* is torch.float8_e4m3fn; only floating-point"),
        ("channel", lambda all_: all_.update({"lm_head.weight": torch.ones(61, 192).to(E4M3)}),
         "lm_head.weight in .* is torch.float8_e4m3fn; .*the decoder's linear layers that quantization_config"),
        ("channel", lambda all_: all_.update({"model.layers.0.self_attn.o_proj.input_scale": torch.ones(1)}),
         "unexpected tensor .*input_scale"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_checkpoint_in_fp8_is_named(plain_model, tmp_path, layout, change, message):
    directory = quantized_copy(plain_model, tmp_path / "fp8", LAYOUTS[layout])
    tensors = read_tensors(directory)
    change(tensors)
    write_tensors(directory, tensors)
    with pytest.raises(ValueError, match=message):
        completions(directory)


def test_a_checkpoint_with_another_block_size_than_it_says_is_named(plain_model, tmp_path):
    directory = quantized_copy(plain_model, tmp_path / "fp8", LAYOUTS["block"], weight_block_size=[64, 64])
    with pytest.raises(ValueError, match=r"_scale_inv in .* has shape .*, the model needs"):
        completions(directory)


def test_a_plain_checkpoint_that_says_fp8_and_the_other_way_round_are_named(plain_model, tmp_path):
    says = changed_copy(plain_model, tmp_path / "says", lambda *pair: dict([pair]), quantization_config=compressed())
    with pytest.raises(ValueError, match=r"float32, but quantization_config in config.json says float8_e4m3fn"):
        completions(says)
    holds = changed_copy(plain_model, tmp_path / "holds", CHANNEL.stored)
    with pytest.raises(
        ValueError, match=r"only for the decoder's linear layers that quantization_config|no such parameter"
    ):
        completions(holds)


def test_options_that_cannot_be_are_named(plain_model, tmp_path):
    with pytest.raises(ValueError, match="quantization must be None or \"fp8\", not 'int4'"):
        LLM(str(plain_model), quantization="int4")
    with pytest.raises(ValueError, match=r"quantization='fp8' needs dtype=\"bfloat16\" or \"float32\""):
        open_llm(plain_model, quantization="fp8", dtype="float16")
    with pytest.raises(ValueError, match=r"a checkpoint in FP8 needs dtype=\"bfloat16\" or \"float32\""):
        open_llm(quantized_copy(plain_model, tmp_path / "fp8"), dtype="float16")
