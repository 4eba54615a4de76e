"""What a gated DeltaNet layer takes, gives and hands on."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.family_factory import FAMILIES, save_family_model

from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.layers import delta_net as delta_net_layer
from nanovllm.layers.context import LayerContext
from nanovllm.layers.delta_net_config import DeltaNetConfig
from nanovllm.layers.forms import Form
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.quantization import Formats
from nanovllm.models.decoder import CausalLM
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel

META = torch.device("meta")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_gates_and_small_projections_take_no_scaled_numbers(tmp_path, family):
    """With FP8 weights the kernels hand on products without their scales, and rows in FP8."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    save_family_model(tmp_path, family, FAMILIES[family][2](random.Random(2)) | kinds | {"attention_bias": False})
    config = replace(
        load_model_config(tmp_path), fp8=Fp8Config("weight_scale", ignored=("in_proj_a$", "in_proj_b$", "in_proj_ba$"))
    )
    backend = SimpleNamespace(name="triton", reads_new_keys=False)
    model = CausalLM(config, 64, backend, Parallel(), torch.bfloat16, META, True)
    recurrent, full = model.model.layers
    assert full.self_attn.qkv_proj.gives == Form.PLAIN and Form.QUANTIZED in full.self_attn.accepts
    assert full.input_layernorm._quantizes and not recurrent.input_layernorm._quantizes
    assert Form.SCALED in recurrent.linear_attn.out_proj.gives


def test_the_layer_hands_its_choice_of_kernels_on(monkeypatch):
    """The plain operation gives the same tokens, only later."""
    chosen = []

    def noted(qkvz, ba, weights, state, rows, use_kernels=False):
        chosen.append(use_kernels)
        return torch.zeros(len(qkvz), 16)

    monkeypatch.setattr(delta_net_layer, "delta_net", noted)
    numbers = AttentionMetadata.__dataclass_fields__
    metadata = SimpleNamespace(**dict.fromkeys(numbers, 0))
    for use_kernels in (False, True):
        context = LayerContext(torch.float32, torch.device("cpu"), use_kernels)
        formats = Formats(None, context)
        layer = delta_net_layer.GatedDeltaNet(
            0, "x", DeltaNetConfig(1, 2, 8, 8, 3), 16, 1e-6, formats, Form.PLAIN, context
        )
        layer(torch.zeros(2, 16), None, [None], [metadata])
    assert chosen == [False, True]
