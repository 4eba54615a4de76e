"""Measuring: bench.py and benchmarks/."""

import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.family_factory import FAMILIES, save_family_model

import bench
import nanovllm
from benchmarks import peers, plot, roofline, step_budget, timing, workloads
from benchmarks.ours import make_llm
from benchmarks.timing import Timing
from benchmarks.workloads import make_requests, write_config
from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.engine.step import Chunk, Step
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.models.config import ModelConfig
from nanovllm.models.cost import (
    Rates,
    StepWork,
    layer_matrices,
    num_parameters,
    roofline_seconds,
    state_bytes,
    step_costs,
    step_weight_bytes,
    token_kv_bytes,
)
from nanovllm.models.decoder import CausalLM
from nanovllm.models.read_config import load_model_config
from nanovllm.ops.collectives import Parallel


def event(name: str, begin: float, end: float, category: str = "kernel") -> dict:
    return {"cat": category, "name": name, "ts": begin, "dur": end - begin}


def sequence(num_computed_tokens: int, block_table=(), num_cached_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_computed_tokens=num_computed_tokens, block_table=list(block_table), num_cached_tokens=num_cached_tokens
    )


def work_of(*chunks: Chunk, block_size: int = 16, windows: tuple[int, ...] = (0,)) -> StepWork:
    step = Step(list(chunks), sum(chunk.num_new_tokens == 1 for chunk in chunks))
    return roofline.step_work(step, windows, block_size)


# Where a step's time goes


def test_overlapping_kernels_count_once_and_gaps_are_idle():
    """A kernel that waits for the previous kernel starts long before it works; its whole duration would count twice."""
    times = step_budget.times_of_parts([
        event("merge_kernel", 30, 60),
        event("nvjet_sm90", 0, 10),
        event("decode_kernel", 10, 50),
        event("launch", 0, 1000, "cpu_op"),
        event("_rms_norm_kernel", 65, 70),
        event("Memcpy DtoH", 70, 72, "gpu_memcpy"),
    ])  # fmt: skip
    assert sum(times.values()) == 72
    assert times["attention"] == 50 and times["matrix products"] == 10
    assert times["norms, rotation, store, SiLU"] == 5 and times["idle"] == 5 and times["the rest"] == 2


def test_every_kernel_of_ours_has_its_part():
    """A kernel with a new name would count as the rest. That is right for kernels that prepare or end a step."""
    sources = [path.read_text(encoding="utf-8") for path in Path(nanovllm.__file__).parent.rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (?!has_)(\w+_kernel)\(", source, re.MULTILINE)}
    assert {"decode_kernel", "_rms_norm_kernel"} <= kernels
    rest = {name for name in kernels if step_budget.part_of(name) == step_budget.REST}
    assert rest <= {
        "_copy_kernel", "_expand_rows_kernel", "plan_kernel", "_list_decodes_kernel",
        "_write_tokens_kernel",
        "_check_kernel", "_write_kernel", "_weights_sum_kernel",  # of canaries and digests, which benchmarks leave out
    }  # fmt: skip


def test_a_kernel_is_found_in_its_part():
    assert step_budget.part_of("decode_kernel") == "attention"
    assert step_budget.part_of("_delta_decode_kernel") == "DeltaNet"
    assert step_budget.part_of("_qk_norm_rotate_store_kernel") == "norms, rotation, store, SiLU"
    assert step_budget.part_of("void cublasLt::splitKreduce_kernel<32>") == "matrix products"


def test_a_parts_roofline_is_its_bytes_or_its_arithmetic():
    steps = {
        "key_value_bytes": 300, "state_bytes": 400, "score_operations": 2000, "weight_bytes": 500,
        "matrix_operations": 3000, "logit_bytes": 100, "bytes_per_second": 100, "matrix_operations_per_second": 1000,
        "fp8_matrix_operations": 0, "fp8_matrix_operations_per_second": 2000,
    }  # fmt: skip
    assert step_budget.rooflines(steps) == {"attention": 3 + 2, "matrix products": 5, "DeltaNet": 4, "sampling": 1}
    steps["fp8_matrix_operations"] = 6000
    assert step_budget.rooflines(steps)["matrix products"] == 3 + 3


# The roofline of a run


def num_weights(config, num_tokens: int = 1) -> int:
    return step_weight_bytes(config, 1, num_tokens)


@pytest.mark.parametrize(
    "size", ["40M", "8B", "gemma3-4B", "granite-8B", "llama-1B", "llama-8B", "olmo3-7B", "qwen2.5-7B"]
)
def test_the_roofline_counts_every_matrix_once(tmp_path, size):
    """A tied embedding counts once, as the LM head. An untied embedding is only looked up, so it does not count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(size, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    matrices = {name: weight for name, weight in model.named_parameters() if name.endswith("proj.weight")}
    config = load_model_config(tmp_path)
    assert len(matrices) == 7 * config.num_hidden_layers
    expected = sum(weight.numel() for weight in matrices.values()) + model.lm_head.weight.numel()
    assert num_weights(config) == expected


@pytest.mark.parametrize(
    ("size", "num_billions", "num_windows", "window", "token_kib"),
    [
        ("gemma3-4B", 3.88, 29, 1024, 136),
        ("granite-8B", 8.17, 0, 0, 160),
        ("olmo3-7B", 7.30, 24, 4096, 512),
    ],
)
def test_sizes_have_the_numbers_of_the_models_that_they_are_named_after(
    tmp_path, size, num_billions, num_windows, window, token_kib
):
    """Parameters, layers with windows, the length of these, and KiB of a token's keys and values in bfloat16."""
    write_config(size, tmp_path)
    config = load_model_config(tmp_path)
    assert num_parameters(config) / 1e9 == pytest.approx(num_billions, abs=0.005)
    windows = [layer.window for layer in config.layers if layer.window]
    assert windows == [window] * num_windows
    assert token_kv_bytes(config, 2) == token_kib * 1024


def test_the_roofline_counts_the_experts_that_are_read(tmp_path):
    """One token reads 8 of 128 experts, many tokens read all; the weights of 30B-A3B are 30.5 billion numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config("30B-A3B", tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    numbers = {name: weight.numel() for name, weight in model.named_parameters() if weight.ndim > 1}
    config = load_model_config(tmp_path)
    embedding = config.vocab_size * config.hidden_size
    assert num_weights(config, 10**6) == sum(numbers.values()) - embedding
    assert num_parameters(config) == sum(numbers.values()) and 30.5e9 < num_parameters(config) < 30.6e9
    of_experts = sum(number for name, number in numbers.items() if ".experts." in name)
    assert num_weights(config) == sum(numbers.values()) - embedding - of_experts * 15 // 16
    assert num_weights(config, 2) - num_weights(config) == pytest.approx(of_experts / 16 * 15 / 16)


def test_the_roofline_counts_a_shared_expert_for_every_token(tmp_path):
    """Its weights and its gate are read by any step. Layers without experts have an MLP of another size."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    options = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "decoder_sparse_step": 2}
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(architectures=["Qwen2MoeForCausalLM"], **options))
    model.config.save_pretrained(tmp_path)
    numbers = {name: weight.numel() for name, weight in model.named_parameters() if weight.ndim > 1}
    config = load_model_config(tmp_path)
    assert num_parameters(config) == sum(numbers.values())
    of_experts = sum(number for name, number in numbers.items() if ".experts." in name)
    embedding = config.vocab_size * config.hidden_size
    assert num_weights(config) == sum(numbers.values()) - embedding - of_experts * 3 // 4


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_the_roofline_counts_the_weights_and_states_of_delta_nets(tmp_path, family):
    """Queries have gates. A row reads its states, unless its sequence begins with it, and writes them."""
    options = {
        "num_hidden_layers": 4, "layer_types": ["full_attention", *["linear_attention"] * 3], "hidden_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2, "attention_bias": False,
    }  # fmt: skip
    options = FAMILIES[family][2](random.Random(0)) | {"num_attention_heads": 4} | options
    model = save_family_model(tmp_path, family, options | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    config = load_model_config(tmp_path)
    assert num_parameters(config) == sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    assert token_kv_bytes(config, 2) == 2 * 2 * config.head_dim * 2
    net = config.delta_net
    recurrent, num_channels = 4 * 4 * net.key_dim * net.value_dim, 4 * net.key_dim + 4 * net.value_dim
    assert state_bytes(config, 2) == 3 * (recurrent + 2 * net.kernel_size * num_channels)
    work = work_of(Chunk(sequence(9), 1, True), Chunk(sequence(5), 5, True), Chunk(sequence(7), 0, False))
    for ignored in ((), (r"in_proj_qkv", r"in_proj_z", "experts")):
        plain = () if family == "qwen3_next" else (r"in_proj_a$", r"in_proj_b$")
        check_weight_bytes(replace(config, fp8=Fp8Config("weight_scale", ignored=("in_proj_ba", *plain, *ignored))))
    (cost,) = step_costs(config, 2, 2, [work])
    assert cost.state_bytes == (2 + 1) * 3 * recurrent
    assert cost.kv_bytes == 9 * token_kv_bytes(config, 2)
    of_pair = 4 * config.num_attention_heads * config.head_dim
    assert cost.attention_flop == (1 + 2 + 3 + 4 + 5) * of_pair
    in_seconds = (cost.kv_bytes + cost.state_bytes + cost.weight_bytes) / 1e9
    assert cost.seconds(Rates(1e9, 1e15, 1)) == pytest.approx(in_seconds)
    with LLM(tmp_path, device="cpu", max_model_len=64) as llm, roofline.logged_steps(llm) as log:
        llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert log.steps == [StepWork(5, 1, 0, 1 + 2 + 3 + 4 + 5, 1), StepWork(1, 1, 6, 0, 2)]
    # The last layer's DeltaNet computes all tokens, and its output projection only those that sample.
    of_head = config.vocab_size * 64
    of_inputs = (
        sum(weight.numel() for name, weight in model.named_parameters() if ".3.linear_attn" in name and weight.ndim > 1)
        - 64 * 4 * net.value_dim
    )
    one, many = (step_costs(config, 2, 2, [StepWork(n, 1, 0, 0, 1)])[0].product_flop for n in (1, 2))
    read = step_weight_bytes(config, 1, 1)
    of_last = sum(each.num_parameters for each in layer_matrices(config, 1) if each.name.startswith("model.layers.3."))
    assert one == 2 * read and many - one == 2 * (read - of_head - of_last + of_inputs)


def test_a_shared_block_is_read_once():
    """Two decodes behind a prefix of two blocks read those once, and each their own third block."""
    work = work_of(Chunk(sequence(40, [7, 8, 1], 32), 1, True), Chunk(sequence(35, [7, 8, 2], 32), 1, True))
    assert work == StepWork(num_tokens=2, num_sampled=2, num_keys=32 + 8 + 3, num_pairs=0, num_states=4)


def test_a_prompts_queries_count_the_keys_that_they_see():
    """5 queries at the end of 20 tokens see 16 to 20 keys. The roofline once left out half a key per query."""
    work = work_of(Chunk(sequence(20), 5, False), Chunk(sequence(9), 1, True))
    assert work == StepWork(num_tokens=6, num_sampled=1, num_keys=9, num_pairs=16 + 17 + 18 + 19 + 20, num_states=4)


def test_layers_with_a_window_read_the_keys_in_it():
    """Two layers of three have a window of 8 keys. The roofline once counted all keys in every layer."""
    chunks = Chunk(sequence(20), 5, False), Chunk(sequence(9), 9, False), Chunk(sequence(30), 1, True)
    work = work_of(*chunks, windows=(8, 0, 8))
    assert work.num_keys == pytest.approx((8 + 30 + 8) / 3)
    of_all = 16 + 17 + 18 + 19 + 20 + sum(range(1, 10))
    of_window = 5 * 8 + sum(range(1, 9)) + 8
    assert work.num_pairs == pytest.approx((of_window + of_all + of_window) / 3)


def test_a_steps_roofline_is_reading_keys_plus_the_longer_of_weights_and_arithmetic(tmp_path):
    write_config("40M", tmp_path)
    config = load_model_config(tmp_path)
    of_sampled = 512 * (8 * 64 + 3 * config.intermediate_size) + 32000 * 512  # o, gate, up and down of the last layer
    of_all = num_weights(config) - of_sampled
    works = work_of(Chunk(sequence(1000), 1, True)), work_of(Chunk(sequence(3000), 3000, True))
    decode, prompt = step_costs(config, 2, 2, works)
    keys = 1000 * (2 * 8 * 4 * 64) * 2 / 1e9
    weights = num_weights(config) * 2 / 1e9
    assert decode.seconds(Rates(1e9, 1e15, 1)) == pytest.approx(keys + weights)
    pairs = 3000 * 3001 // 2
    arithmetic = 2 * (3000 * of_all + of_sampled) + pairs * 4 * 8 * 8 * 64
    assert prompt.seconds(Rates(1e15, 1e12, 1)) == pytest.approx(arithmetic / 1e12)
    rates = Rates(1e9, 1e12, 1)
    assert roofline_seconds([decode, prompt], rates) == decode.seconds(rates) + prompt.seconds(rates)


@pytest.mark.parametrize(
    ("size", "fp8"),
    [
        ("40M", Fp8Config()),
        ("40M", Fp8Config("weight_scale_inv", (128, 100), ignored=(r"\.0\.mlp", "o_proj"))),
        ("30B-A3B", Fp8Config()),
        ("30B-A3B", Fp8Config("weight_scale_inv", (128, 128))),
    ],
)
def test_weights_in_fp8_count_as_what_the_model_holds(tmp_path, size, fp8):
    """Every byte of the decoder's parameters except those of norms, and of the embedding, which is not read whole."""
    write_config(size, tmp_path)
    check_weight_bytes(replace(load_model_config(tmp_path), fp8=fp8))


def check_weight_bytes(config: ModelConfig) -> None:
    backend = SimpleNamespace(name="torch", reads_new_keys=False)
    model = CausalLM(config, 64, backend, Parallel(), torch.bfloat16, torch.device("meta"))
    matrices = {
        name: parameter for name, parameter in model.named_parameters()
        if not name.endswith(("norm.weight", "embed_tokens.weight", "A_log", "dt_bias"))
    }  # fmt: skip
    assert any(parameter.dtype == torch.float8_e4m3fn for parameter in matrices.values())
    if "lm_head.weight" not in matrices:
        matrices["lm_head.weight"] = model.lm_head.weight
    assert step_weight_bytes(config, 2, 10**9) == sum(each.nbytes for each in matrices.values())


def test_a_cache_in_fp8_counts_with_its_scales(tmp_path):
    write_config("40M", tmp_path)
    config = load_model_config(tmp_path)
    for dtype, of_head in ((torch.float8_e4m3fn, 64 + 2), (torch.bfloat16, 2 * 64)):
        assert token_kv_bytes(config, dtype.itemsize) == 2 * 8 * 4 * of_head


def test_products_in_fp8_count_at_their_own_rate(tmp_path):
    """The LM head's products keep the usual rate. After the last attention, only sampling tokens are multiplied."""
    write_config("40M", tmp_path)
    config = replace(load_model_config(tmp_path), fp8=Fp8Config())
    [prompt] = step_costs(config, 2, 2, [work_of(Chunk(sequence(3000), 3000, True))])
    of_layer = 512 * (8 * 64 * 2 + 4 * 64 * 2 + 3 * 1536)
    in_fp8 = 2 * (3000 * (7 * of_layer + 512 * 16 * 64) + of_layer - 512 * 16 * 64)
    head, scores = 2 * 512 * 32000, 3000 * 3001 // 2 * 4 * 8 * 8 * 64
    assert (prompt.product_flop, prompt.fp8_product_flop) == (head, in_fp8)
    found = prompt.seconds(Rates(1e15, 1e12, 2e12))
    assert found == pytest.approx((head + scores) / 1e12 + in_fp8 / 2e12)


def test_an_engine_in_fp8_is_measured_as_one():
    arguments = bench.parse_arguments(
        ["--quantization", "fp8", "--kv-cache-dtype", "fp8", "--device", "cpu", "--max-model-len", "64"]
    )
    with make_llm(arguments, str(MODEL_DIRECTORY), True) as llm:
        config, itemsize, kv_itemsize = roofline.config_and_itemsizes(llm)
    assert config.fp8 == Fp8Config() and (itemsize, kv_itemsize) == (4, 1)
    usual = bench.parse_arguments(["--device", "cpu", "--max-model-len", "64"])
    with make_llm(usual, str(MODEL_DIRECTORY), True) as llm:
        config, itemsize, kv_itemsize = roofline.config_and_itemsizes(llm)
    assert config.fp8 is None and (itemsize, kv_itemsize) == (4, 4)


def test_a_deterministic_engine_is_measured_as_one():
    arguments = bench.parse_arguments(["--deterministic", "--device", "cpu", "--max-model-len", "64"])
    with make_llm(arguments, str(MODEL_DIRECTORY), True) as llm:
        assert llm.engine.config.deterministic and llm.engine.info.attention_backend == "tiled"


def test_the_steps_of_a_run_are_logged():
    """Two prompts of 3 and 1 tokens with two tokens each: the log has their new tokens, samples and keys."""
    arguments = bench.parse_arguments(["--device", "cpu", "--max-model-len", "64"])
    with make_llm(arguments, str(MODEL_DIRECTORY), True) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        with roofline.logged_steps(llm) as log:
            llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
        num_steps = len(log.steps)
        llm.generate([[5]], params, use_tqdm=False)
        costs = roofline.costs_of(llm, log)
    assert len(log.steps) == len(costs) == num_steps
    assert sum(step.num_tokens for step in log.steps) == 3 + 1 + 2
    assert sum(step.num_sampled for step in log.steps) == 4
    assert sum(step.num_keys for step in log.steps) == 1 + 4 + 2
    assert sum(step.num_pairs for step in log.steps) == 1 + 2 + 3
    assert all(cost.seconds(Rates(1, 1, 1)) > 0 for cost in costs)


# Workloads and calls


@pytest.mark.parametrize(
    "name, num_seqs, shortest, longest, fewest, most",
    [("classify", 2048, 300, 1500, 1, 1), ("docs", 64, 8000, 16000, 32, 96), ("nano", 256, 100, 1024, 100, 1024)],
)
def test_a_workload_has_the_lengths_that_its_name_promises(name, num_seqs, shortest, longest, fewest, most):
    requests = make_requests(name, 151936)
    lengths = [len(prompt) for prompt in requests.prompts]
    assert len(lengths) == len(requests.max_tokens) == num_seqs
    assert shortest <= min(lengths) < shortest * 1.1 and longest * 0.9 < max(lengths) <= longest
    assert fewest <= min(requests.max_tokens) <= max(requests.max_tokens) <= most
    assert max(token for prompt in requests.prompts for token in prompt) == 10000


def test_prompts_are_drawn_before_output_lengths(monkeypatch):
    """Otherwise other output lengths would change the prompts, and their figures could not be compared."""
    prompts = make_requests("one", 259).prompts
    monkeypatch.setitem(workloads.WORKLOADS, "one", workloads.WORKLOADS["one"]._replace(output_lengths=(1, 9)))
    assert make_requests("one", 259).prompts == prompts


def test_sampling_options_apply_to_every_request():
    arguments = bench.parse_arguments(["--workload", "nano", "--top-k", "20", "--top-p", "0.95"])
    requests = make_requests(arguments.workload, 1000, arguments.sampling)
    params = requests.sampling_params()
    assert len(params) == 256 and {(each.temperature, each.top_k, each.top_p) for each in params} == {(0.6, 20, 0.95)}
    assert [each.max_tokens for each in params] == requests.max_tokens and all(each.ignore_eos for each in params)
    greedy = bench.parse_arguments(["--workload", "nano", "--temperature", "0"])
    assert make_requests("nano", 1000, greedy.sampling).sampling_params()[0].temperature == 0


def test_the_first_call_is_timed_on_its_own(monkeypatch, capsys):
    """It was once thrown away, although an offline job has no other call. Each call is announced: a benchmark against
    transformers said nothing for minutes."""
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0, 30.0, 32.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []

    def run() -> list[list[int]]:
        calls.append("run")
        return [[1, 2, 3]]

    found = timing.timed("ours", run, lambda: calls.append("forget"), repeats=3, start_seconds=7.0)
    assert calls == ["forget", "run"] * 4
    announced = [f"ours: call {index + 1} of 4 … {seconds} s\n" for index, seconds in enumerate((5.0, 1.0, 3.0, 2.0))]
    assert capsys.readouterr() == ("", "".join(announced))
    assert (found.first_seconds, found.seconds, found.median) == (5.0, [1.0, 3.0, 2.0], 2.0)
    report = found.report(workloads.Requests([[0] * 10], [3], {}))
    assert report["first_output_tokens_per_second"] == 3 / 5 and report["output_tokens_per_second"] == 3 / 2
    assert report["first_input_tokens_per_second"] == 10 / 5 and report["input_tokens_per_second"] == 10 / 2


@pytest.mark.parametrize(
    "options, text",
    [(["--tensor-parallel-size", "3"], "tensor_parallel_size=3"), (["--top-p", "2"], "top_p must be")],
)
def test_a_wrong_option_ends_with_the_errors_text_alone(monkeypatch, options, text):
    """It once ended with a traceback."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    with pytest.raises(SystemExit) as exit:
        bench.main()
    assert text in exit.value.code and exit.value.__cause__ is None


# Other engines


class FakeVllm(ModuleType):
    """The part of vLLM's interface that a benchmark needs."""

    __version__ = "0.24.0"

    class SamplingParams(SimpleNamespace):
        pass

    class LLM:
        def __init__(self, model, **options):
            self.model, self.options, self.num_resets = model, options, 0

        def generate(self, prompts, sampling_params, *, use_tqdm):
            assert not use_tqdm and all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
            completions = [SimpleNamespace(token_ids=(5,) * params.max_tokens) for params in sampling_params]
            return [SimpleNamespace(outputs=[completion]) for completion in completions]

        def reset_prefix_cache(self):
            self.num_resets += 1


def task(tmp_path, **options):
    requests = make_requests("one", 259, {"top_k": 20})
    values = {
        "requests": requests, "directory": str(tmp_path), "has_weights": False, "dtype": "bfloat16", "device": "cpu",
        "max_model_len": 4096, "prefix_caching": True, "tensor_parallel_size": 1, "seed": 0,
        "quantization": None, "kv_cache_dtype": "auto", **options,
    }  # fmt: skip
    return peers.Task(**values)


def test_vllm_gets_the_same_requests_and_all_else_by_default(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm("vllm"))
    ours = Timing(1.0, 4.0, [2.0], [[5] * 512])
    made = []
    monkeypatch.setitem(peers.PEERS, "vllm", lambda task: made.append(peers.VllmPeer(task)) or made[0])
    report = peers.measure_peer("vllm", task(tmp_path), ours, repeats=2)
    [peer] = made
    assert capsys.readouterr().err.startswith("vllm: loading the model\nvllm: call 1 of 3 … ")
    assert peer.llm.options == {
        "dtype": "bfloat16", "max_model_len": 4096, "seed": 0, "enable_prefix_caching": True, "tensor_parallel_size": 1,
        "load_format": "dummy", "skip_tokenizer_init": True,
    }  # fmt: skip
    assert peer.llm.num_resets == 3 and report["vllm_settings"]["version"] == "0.24.0"
    assert report["ratio_to_vllm"] == pytest.approx(sorted(report["vllm_seconds"])[0] / 2.0, abs=1e-2)
    assert len(report["vllm_seconds"]) == 2 and "requests_with_equal_tokens" not in report


def test_an_engine_that_stops_early_is_not_compared(monkeypatch, tmp_path):
    """Fewer tokens take less time."""
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm("vllm"))
    monkeypatch.setattr(peers.VllmPeer, "run", lambda self, requests: [[5]])
    with pytest.raises(SystemExit, match="other numbers of tokens"):
        peers.measure_peer("vllm", task(tmp_path), Timing(1.0, 4.0, [2.0], [[5] * 512]), repeats=1)


def test_an_engine_that_is_missing_or_cannot_sample_so_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install vllm"):
        peers.check_peer("vllm", {})
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match="transformers has no presence_penalty"):
        peers.check_peer("transformers", {"presence_penalty": 1.0})
    peers.check_peer("transformers", {"top_k": 20, "repetition_penalty": 1.1})
    with pytest.raises(SystemExit, match="would not compute in FP8"):
        peers.check_peer("transformers", {}, is_fp8=True)


# Figures


def test_the_plots_figures_are_there():
    """Renamed keys of a measurement would leave a bar or a roofline out."""
    series = plot.figures_of(plot.read_results("H200"))
    assert list(series) == ["nanovllm", "vLLM 0.24.0", "mini-sglang", "nano-vllm", "roofline"]
    assert set(series["nanovllm"]) <= set(plot.WORKLOADS) and "nano" in series["roofline"]
    for workload, figure in series["roofline"].items():
        ours = series["nanovllm"][workload]
        assert ours.low <= ours.high < figure.low


def test_every_measurement_says_what_ran_where():
    """Each line is one measurement."""
    lines = plot.RESULTS.read_text(encoding="utf-8").splitlines()
    entries = plot.read_results("")
    assert len(entries) == len(lines) - 2 > 90
    for entry in entries:
        assert entry["name"] and entry["device"] and entry["how"]
        assert len(entry["commit"]) == 7 if entry["engine"] == "nanovllm" else "commit" not in entry
    others = {entry["name"] for entry in entries} - set(plot.WORKLOADS)
    assert others >= {"budget-nano", "growth-requests-0.6B"}


def test_sampling_options_are_those_of_sampling_params():
    assert set(workloads.SAMPLING_OPTIONS) <= set(SamplingParams.__dataclass_fields__)
