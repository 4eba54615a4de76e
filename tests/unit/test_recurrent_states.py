"""Recurrent states on the device: their budget, their tensors and copies of them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.block_manager import NO_STATES, Snapshots
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk, Step
from nanovllm.models.config import DeltaNetConfig, ModelConfig
from nanovllm.models.cost import state_bytes, weight_bytes
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel
from nanovllm.ops.copy_blocks import copy_blocks
from nanovllm.ops.kernel import has_kernels
from nanovllm.ops.layer_cache import LayerCache
from nanovllm.ops.layer_state import LayerState
from nanovllm.parallel.worker import fingerprint
from nanovllm.runner import memory, settings
from nanovllm.runner.kv_cache import KVCacheLayout, empty_states
from nanovllm.runner.step_program import StepProgram

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def config() -> ModelConfig:
    """The bundled model's config, but every second layer is recurrent."""
    config = load_model_config(MODEL_DIRECTORY)
    layers = tuple(layer._replace(is_recurrent=index % 2 == 0) for index, layer in enumerate(config.layers))
    return replace(config, layers=layers, delta_net=DeltaNetConfig(2, 4, 8, 16, 3))


def test_a_layer_has_keys_or_states(config):
    states = empty_states(config, 5, 1, torch.bfloat16, CPU)
    layout = KVCacheLayout(config.cache_places, 16, 2, 8, torch.bfloat16)
    cache = layout.empty(7, CPU, states)
    assert [type(layer) for layer in cache.layers] == [
        LayerState if layer.is_recurrent else LayerCache for layer in config.layers
    ]
    first, *_, last = [layer for layer in cache.layers if isinstance(layer, LayerState)]
    assert first.recurrent.shape == (5, 4, 16, 8) and first.recurrent.dtype == torch.float32
    assert first.inputs.shape == (5, 3, 2 * 2 * 8 + 4 * 16) and first.inputs.dtype == torch.bfloat16
    assert first.num_key_heads == 2
    assert first.recurrent.data_ptr() != last.recurrent.data_ptr()
    assert (cache.num_blocks, cache.block_size, layout.num_parts) == (7, 16, config.num_attention_layers)
    assert sum(tensor.nbytes for tensor in states) == 5 * state_bytes(config, 2)
    assert cache.nbytes == 7 * layout.block_bytes and cache.nbytes_released == 0


def test_ranks_divide_the_heads_of_states(config):
    recurrent, inputs = empty_states(config, 3, 2, torch.float32, CPU)
    assert recurrent.shape[2:] == (3, 2, 16, 8) and inputs.shape[2:] == (3, 3, 2 * 8 + 2 * 16)


def test_states_are_released_with_the_cache(config):
    """Sleep frees both, and both come back."""
    layout = KVCacheLayout(config.cache_places, 16, 2, 8, torch.float32)
    cache = layout.empty(2, CPU, empty_states(config, 3, 1, torch.float32, CPU))
    cache.release()
    assert cache.nbytes_released == cache.nbytes + 3 * state_bytes(config, 4)
    cache.restore()
    assert cache.nbytes_released == 0


def test_a_model_without_recurrent_layers_has_no_states():
    config = load_model_config(MODEL_DIRECTORY)
    assert empty_states(config, 10**6, 1, torch.float32, CPU) == () and state_bytes(config, 2) == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_large_state_is_copied_whole(fused):
    """Several programs of the kernel share a state."""
    if fused and not has_kernels():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    whole = torch.randn(1, 2, 4, 5, 5003)
    expected = whole.clone()
    for source, target in ((0, 3), (2, 1)):
        expected[:, :, target] = expected[:, :, source]
    copy_blocks(whole, ((0, 3), (2, 1)), fused)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    ("free", "state", "expected"),
    [
        (80 * GIB, 0, 1024),
        # Half of 72 − 8 GiB holds 606 × 54 MiB: states of 48 MiB, and an eighth of that for snapshots.
        (80 * GIB, 48 * 2**20, 592),
        (40 * GIB, 48 * 2**20, 256),
        (10 * GIB, 48 * 2**20, 16),
    ],
)
def test_the_default_number_of_sequences_counts_their_states(free, state, expected):
    assert memory.default_max_num_seqs(Config("m"), 8 * GIB, 32 * 2**10, state, free, True) == expected


def test_states_that_do_not_fit_are_refused():
    memory.check_states_fit(GIB, 10, Snapshots(True, 4), 15 * GIB, CPU)
    message = r"max_num_seqs=10 needs 15.00 GiB of cpu for recurrent states, of which 4 .* 14.00 GiB .* lower"
    with pytest.raises(RuntimeError, match=message):
        memory.check_states_fit(GIB, 10, Snapshots(True, 4), 14 * GIB, CPU)


def test_states_that_leave_no_room_for_keys_are_named():
    """Once the message named only max_model_len."""
    use = memory.MemoryUse(total=0, free_at_start=0, free=10 * GIB, states=9 * GIB)
    with pytest.raises(RuntimeError, match="lower max_model_len or max_num_seqs"):
        memory.num_kvcache_blocks(Config("m"), use, GIB, 2, 32, False)
    assert memory.num_kvcache_blocks(Config("m"), replace(use, states=2 * GIB), GIB, 1, 16, False) == 2


def test_without_a_prefix_cache_no_states_are_kept():
    assert memory.num_snapshots(Config("m", enable_prefix_caching=False), 512) == 0
    assert [memory.num_snapshots(Config("m"), number) for number in (1, 64, 512)] == [4, 8, 64]


@pytest.fixture
def directory(tmp_path):
    """A model whose states are large: 8 MiB of a sequence."""
    fields = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 60,
        "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 512, "linear_value_head_dim": 1024, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.mark.parametrize("size", [1, 2])
def test_the_settings_of_a_model_with_states(directory, monkeypatch, size):
    """A rank has a part of the heads. Beside the states of the entries, one is for padding."""
    config, parallel = load_model_config(directory), Parallel(size=size)
    monkeypatch.setattr(Parallel, "minimum", lambda self, number, device: number)
    of_states, of_weights = state_bytes(config, 4) // size, weight_bytes(config, 4, size)
    free = 0
    monkeypatch.setattr(settings, "free_bytes", lambda device: free * size)  # the ranks share it

    def read(**options):
        given = Config(str(directory), device="cpu", dtype="float32", load_format="dummy", **options)
        return settings.read_settings(given, parallel)

    free = of_weights + 29 * of_states
    found = read(max_num_seqs=24)
    assert found.snapshots == Snapshots(True, 4, 64) and found.num_states == 29
    with pytest.raises(RuntimeError, match="max_num_seqs=25 needs"):
        read(max_num_seqs=25)
    free -= 1
    with pytest.raises(RuntimeError, match="max_num_seqs=24 needs"):
        read(max_num_seqs=24)
    free += 1
    assert read(max_num_seqs=28, enable_prefix_caching=False).num_states == 29
    free = 360 * of_states  # half of it is for the cache, and half of that for states: 80, and 10 snapshots
    assert read().max_num_seqs == 80


@pytest.mark.parametrize("fused", [False, True])
def test_negative_numbers_of_states_count_from_the_end(fused):
    """The kernel computes addresses. A number that is not wrapped would reach beside the tensor."""
    if fused and not has_kernels():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    around = torch.randn(3, 2, 4, 5, 7)
    whole, expected = around[1:2], around.clone()
    expected[1, :, 3], expected[1, :, 1] = expected[1, :, 0], expected[1, :, 2]
    program = SimpleNamespace(kv_cache=SimpleNamespace(states=(whole,)), use_kernels=fused)
    StepProgram._copy_states(program, ((0, -1), (-2, 1)))
    assert torch.equal(around, expected)


def test_memory_of_states_is_reported(directory, caplog):
    with caplog.at_level("INFO", "nanovllm"), LLM(
        str(directory), device="cpu", dtype="float32", load_format="dummy", max_num_seqs=2,
        num_kvcache_blocks=3, kvcache_block_size=16, max_model_len=32,
    ) as llm:  # fmt: skip
        assert (
            "recurrent states of 2 sequences and 4 cached prefixes (0.06 GiB); prompts share a prefix only"
            in caplog.text
        )
        assert "3 KV cache blocks of 16 tokens (0.00 GiB of" in caplog.text
        memory = llm.metrics()["memory_bytes"]
        assert memory["states"] == (2 + 1 + 4) * state_bytes(load_model_config(directory), 4)
        assert memory["kv_cache"] == 3 * 16 * 2 * 2 * 16 * 4
        llm.sleep(1)
        assert llm.metrics()["memory_bytes"]["states"] == llm.metrics()["memory_bytes"]["kv_cache"] == 0
        llm.wake_up()
        assert llm.metrics()["memory_bytes"] == memory


def test_a_log_and_dt_bias_keep_float32(directory):
    """Rounded to 16 bits, the decay of a long memory is another: exp(a_log) is a rate."""
    with LLM(str(directory), device="cpu", dtype="bfloat16", load_format="dummy", max_model_len=32) as llm:
        found = dict(llm.engine.runner.program.model.named_parameters())
    dtypes = {name.rsplit("linear_attn.")[1]: weight.dtype for name, weight in found.items() if "linear_attn" in name}
    assert dtypes.pop("A_log") == dtypes.pop("dt_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_blocks_fit_beside_the_states(directory, monkeypatch):
    """A CPU's memory is taken when it is first written, so states that no sequence had yet seem to be free."""
    options = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 2, "max_model_len": 32}
    needed = (2 + 1 + 4) * state_bytes(load_model_config(directory), 4) + 3 * 16 * 2 * 2 * 16 * 4
    for missing in (0, 1):
        monkeypatch.setattr(settings.Settings, "free_bytes", lambda self, missing=missing: needed - missing)
        if missing:
            with pytest.raises(RuntimeError, match="num_kvcache_blocks"):
                LLM(str(directory), **options, num_kvcache_blocks=3, kvcache_block_size=16)
        else:
            LLM(str(directory), **options, num_kvcache_blocks=3, kvcache_block_size=16).close()


def test_ranks_notice_other_copies_of_states():
    """Loads and copies are made at different times. Both had the same fingerprint."""
    seq = Sequence(0, [1, 2], None, 9, status=None)
    seq.block_table, seq.entry = [0], 0
    names = "state_loads", "state_copies"
    pairs = [(-1, 0), (-2, 0), (0, -1), (0, -2), (0, 1)]
    steps = [Step.of([Chunk(seq, 1, True)], **{name: [pair]}) for pair in pairs for name in names]
    assert len(set(map(fingerprint, steps))) == len(steps)


def test_a_model_without_states_keeps_no_snapshots():
    options = Config(MODEL_DIRECTORY, device="cpu", max_num_seqs=3)
    assert settings.read_settings(options, Parallel()).snapshots == NO_STATES
