"""Owns the device, the weights, the KV cache and the step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, build_batch, special_rows, step_lengths
from nanovllm.engine.cuda_graph import CudaGraphs, StepSize, graph_sizes
from nanovllm.engine.device_state import DeviceState
from nanovllm.engine.kv_cache import MemoryUse, explained_out_of_memory, free_bytes, measure_memory, num_kvcache_blocks
from nanovllm.engine.runner import Runner, RunnerInfo
from nanovllm.engine.scheduler import Work
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_inputs import StepInputs
from nanovllm.kernels import AttentionShape, has_triton, make_attention_backend
from nanovllm.layers.sampler import sample, sample_special
from nanovllm.models import ARCHITECTURES
from nanovllm.models.config import load_model_config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.distributed import Parallel
from nanovllm.utils.loader import fill_dummy_weights, find_model, load_weights

logger = logging.getLogger(__name__)

_GIB = 2**30
# Larger steps only push the activations out of a CPU's caches.
_USEFUL_CPU_TOKENS = 2048
# Arithmetic of an eager step that decodes beside prompts: enough to keep a fast GPU busy while the host launches the
# next.
_FLOP_BESIDE_DECODES = 12e12
# Tokens × hidden size of a captured one: enough that its matrix products fill the GPU.
_TOKEN_WIDTH_BESIDE_DECODES = 768 * 4096
_FEWEST_TOKENS_BESIDE_DECODES = 512  # matrix products of fewer rows waste a GPU
_LONGEST_DEFAULT_MODEL_LEN = 32768


class StepResult:
    """The tokens of a launched step: on the device now, on the host once `wait` returns."""

    def __init__(self, token_ids: torch.Tensor):
        self._event = None
        self._token_ids = token_ids
        if token_ids.is_cuda:
            self._token_ids = torch.empty_like(token_ids, device="cpu", pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._token_ids.tolist()


class ModelRunner(Runner):
    """Loads a model, or one rank's part of it, and runs its steps on one device.

    Raises:
        ValueError: an unknown or broken model, or an option that the model or the device cannot meet.
        RuntimeError: too little memory, or a device that is not there.
    """

    def __init__(self, config: Config, parallel: Parallel = Parallel()):  # noqa: B008 (frozen)
        self.device = rank_device(config.device, parallel.rank, parallel.size)
        self._parallel = parallel
        self._is_gpu = self.device.type == "cuda"
        directory = find_model(config.model, config.revision, with_weights=config.load_format != "dummy")
        self.model_config = model_config = load_model_config(directory, list(ARCHITECTURES))
        self.max_model_len = _max_model_len(config.max_model_len, model_config.max_position)
        self.dtype = _dtype(config.dtype, model_config.dtype, self.device)
        self.model = self.graphs = self.inputs = self.kv_cache = self.state = self.backend = None
        try:
            with self._on_device(), explained_out_of_memory("the engine", self.device):
                num_blocks = self._start(config, parallel, directory)
        except BaseException:
            self.close()  # so that another try finds the memory
            raise
        self.info = RunnerInfo(
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            generation_config=model_config.generation,
            most_useful_batched_tokens=2**31 if self._is_gpu else _USEFUL_CPU_TOKENS,
            most_tokens_beside_decodes=self._most_tokens_beside_decodes() if self._is_gpu else 2**31,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention_backend=self.backend.name,
        )
        logger.info(
            "%s on %s in %s, attention %s%s, %d KV cache blocks of %d tokens (%.2f GiB), max_model_len %d",
            model_config.architecture, self.device, self.dtype, self.backend.name,
            " with CUDA graphs" if self.graphs else "", num_blocks, self.block_size, self.kv_cache.nbytes / _GIB,
            self.max_model_len,
        )  # fmt: skip

    def _start(self, config: Config, parallel: Parallel, directory: Path) -> int:
        """Loads the model, makes the KV cache and captures graphs; returns the number of blocks."""
        model_config = self.model_config
        free_at_start = free_bytes(self.device)
        if self._is_gpu and parallel.size > 1 and has_triton():
            from nanovllm.kernels.exchange import make_exchange

            exchange = make_exchange(parallel, model_config.hidden_size, self.dtype, self.device)
            parallel = replace(parallel, exchange=exchange)
        shape = AttentionShape(
            num_heads=model_config.num_attention_heads // parallel.size,
            num_kv_heads=max(1, model_config.num_key_value_heads // parallel.size),
            head_dim=model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self.backend = make_attention_backend(config.attention_backend, shape, config.kvcache_block_size)
        self.block_size = config.kvcache_block_size or self.backend.default_block_size
        with explained_out_of_memory("the model", self.device):
            self.model = ARCHITECTURES[model_config.architecture](
                model_config, self.max_model_len, self.backend, parallel, dtype=self.dtype, device=self.device
            )
        if config.load_format == "dummy":
            fill_dummy_weights(self.model, config.seed)
        else:
            load_weights(self.model, directory)
        self._pack_weights()
        blocks_of_longest = -(-self.max_model_len // self.block_size)
        self._groups_prefixes, self._is_grouped, self.max_num_seqs = config.prefix_grouping, False, config.max_num_seqs
        self.state = DeviceState(config.max_num_seqs, blocks_of_longest, self.block_size, self.device)
        self._is_captured = self._is_gpu and self.backend.can_be_captured and not config.enforce_eager
        self._captures_prompts = self._is_captured and self.backend.can_capture_prompts
        if self._captures_prompts:
            most_tokens = max(self._most_tokens_beside_decodes(), 2 * config.max_num_seqs)
            self.inputs = StepInputs(
                min(most_tokens, config.max_num_batched_tokens), config.max_num_seqs, blocks_of_longest,
                self.block_size, self.state.padding_slot, self.device,
            )  # fmt: skip
        num_blocks = self._allocate_kv_cache(config, free_at_start, blocks_of_longest)
        if self._is_captured:
            most_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
            with torch.inference_mode(), explained_out_of_memory("capturing CUDA graphs", self.device):
                self.graphs = CudaGraphs(
                    self._captured_step, self._parked, graph_sizes(most_rows), self.device, parallel.size == 1
                )
            self._check_memory_left()
        return num_blocks

    @torch.inference_mode()
    def launch(self, work: Work) -> StepResult:
        """Starts the step that computes `work` and returns without waiting for the device."""
        with self._on_device():
            if all(num_new_tokens == 1 and samples for _, num_new_tokens, samples in work):
                num_rows = self.graphs.padded_size(len(work)) if self.graphs else len(work)
                if not self.state.update(work, num_rows):
                    self._is_grouped = self._groups_prefixes and self._group_prefixes(work, num_rows)
                if self.graphs:
                    tokens, hidden_states = self.graphs.replay(StepSize(num_rows, self._is_grouped))
                else:
                    seq_ids = [seq.seq_id for seq, _, _ in work]
                    tokens, hidden_states = self.step(self.state.decode_batch(num_rows, self._is_grouped, seq_ids))
                tokens = tokens[: len(work)]
            else:
                self.state.forget_rows()
                tokens, hidden_states = self._step_with_prompts(work)
            self._sample_special(work, tokens, hidden_states)
            return StepResult(tokens)

    def _step_with_prompts(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        _, _, num_decodes = step_lengths(work)
        is_grouped = self._groups_prefixes and self._group_prefixes(work[:num_decodes], self.max_num_seqs)
        size = self.inputs.send(work, is_grouped) if self.graphs and self.inputs else None
        outputs = None if size is None else self.graphs.replay(size)
        if outputs is None:
            return self.step(build_batch(work, self.block_size, self.device, is_grouped))
        tokens, hidden_states = outputs
        return tokens[: sum(samples for _, _, samples in work)], hidden_states

    def step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeds, runs the layers, projects the rows that sample, and samples.

        Returns:
            The tokens, int64 [num_sampled], and the hidden states that they were sampled from.
        """
        batch.context.plan = self.backend.plan(batch.context)
        token_ids, slots = batch.token_ids, batch.in_flight_slots
        if slots is not None:
            # Slot −1 is the last one, that of padding; what it holds is not used.
            token_ids = torch.where(slots < 0, token_ids, self.state.last_token_ids[slots])
        hidden_states = self.model(token_ids, batch.positions, self.kv_cache, batch.context)
        if batch.sampled_rows is not None:
            hidden_states = hidden_states[batch.sampled_rows]
        sampled = sample(self.model.compute_logits(hidden_states), batch.sampling, self.model.lm_head.slice)
        # A row without a token is −1, which is no index for the step that may follow before the host has seen it.
        self.state.last_token_ids[batch.sampled_slots] = sampled.clamp(min=0)
        return sampled, hidden_states

    def _captured_step(self, size: StepSize) -> tuple[torch.Tensor, torch.Tensor]:
        if size.num_tokens:
            return self.step(self.inputs.batch(size))
        return self.step(self.state.decode_batch(size.num_sampled, size.is_grouped))

    @contextmanager
    def _parked(self) -> Iterator[None]:
        with self.state.parked(), self.inputs.parked() if self.inputs else nullcontext():
            yield

    def _sample_special(self, work: Work, tokens: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Samples anew the rows that want more than a temperature, and writes over what they were given.

        Few rows do, so a captured step need not know of them; projecting theirs again keeps its logits from being kept.
        """
        for special in special_rows(work, self.model_config.vocab_size, self.device):
            logits = self.model.lm_head.gather(self.model.compute_logits(hidden_states[special.rows]))
            # Every rank has the same logits, but PyTorch does not promise the same sums of them.
            sampled = self._parallel.broadcast(sample_special(logits, special))
            tokens[special.rows] = sampled
            self.state.last_token_ids[special.slots] = sampled.clamp(min=0)

    def _group_prefixes(self, work: Work, num_rows: int) -> bool:
        # Without a hit nobody shares anything.
        if not any(seq.num_cached_tokens for seq, _, _ in work):
            return False
        tables = [seq.block_table for seq, _, _ in work]
        context_lens = [seq.num_computed_tokens for seq, _, _ in work]
        return self.backend.group_prefixes(tables, context_lens, self.block_size, num_rows)

    def _on_device(self):
        # Triton launches on the current device, whatever its tensors say.
        return torch.cuda.device(self.device) if self._is_gpu else nullcontext()

    def _allocate_kv_cache(self, config: Config, free_at_start: int, blocks_of_longest: int) -> int:
        """Makes the cache as large as memory allows and returns its number of blocks."""
        shape = (self.block_size, self.model.num_kv_heads, self.model_config.head_dim)
        num_layers = self.model_config.num_hidden_layers
        block_bytes = 2 * num_layers * shape[0] * shape[1] * shape[2] * self.dtype.itemsize

        if self._is_gpu:
            self.kv_cache = torch.zeros((2, num_layers, 1, *shape), dtype=self.dtype, device=self.device)
            num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * (self.max_model_len - 1))
            memory = measure_memory(self._try_step, num_tokens, config.max_num_seqs, free_at_start, self.device)
            memory = replace(memory, graphs=self._bytes_for_graphs(memory.activations, num_tokens))
            self.kv_cache = None
            torch.cuda.empty_cache()
        else:
            memory = MemoryUse(total=0, free_at_start=0, free=free_bytes(self.device) // self._parallel.size)
        num_blocks = num_kvcache_blocks(config, memory, block_bytes, blocks_of_longest, self._is_gpu)
        num_blocks = self._parallel.minimum(num_blocks, self.device)
        self.kv_cache = torch.empty((2, num_layers, num_blocks, *shape), dtype=self.dtype, device=self.device)
        if self._is_gpu:
            # With the graphs captured, at least this must be left: activations, and what is not ours to take.
            self._least_free = free_bytes(self.device) - memory.graphs
        return num_blocks

    def _bytes_for_graphs(self, activations: int, num_tokens: int) -> int:
        """Set aside for captured steps, if a step of `num_tokens` takes `activations`: for kernels' code, what the
        steps keep, and the largest one's logits and activations, once tried and once captured."""
        if not self._is_captured:
            return 0
        num_bytes = _GIB // 2 + 2 * self.max_num_seqs * self.model_config.vocab_size * self.dtype.itemsize
        if self.inputs:
            num_bytes += 2 * activations * self.inputs.token_sizes[-1] // num_tokens
        return num_bytes

    @torch.inference_mode()
    def _try_step(self, sizes: list[int]) -> None:
        """Computes prompts of so many tokens each, all over each other in the cache, for their results are thrown away.

        All sample with a top-p, which takes most memory.
        """
        params, work = SamplingParams(temperature=1.0, top_p=0.9), []
        for slot, num_new_tokens in enumerate(sizes):
            seq = Sequence(slot, [0] * num_new_tokens, params, self.max_model_len)
            seq.block_table = [0] * -(-num_new_tokens // self.block_size)
            seq.num_computed_tokens, seq.num_tokens, seq.slot = num_new_tokens, num_new_tokens + 1, slot
            work.append((seq, num_new_tokens, True))
        self.launch(work).wait()

    def _check_memory_left(self) -> None:
        """Raises a RuntimeError if the captured graphs took more than was set aside for them."""
        torch.cuda.empty_cache()
        missing = self._least_free - free_bytes(self.device)
        if missing > 0:
            raise RuntimeError(
                f"CUDA graphs took {missing / _GIB:.2f} GiB more GPU memory than was set aside for them; lower "
                "max_num_seqs or use enforce_eager=True"
            )

    def _most_tokens_beside_decodes(self) -> int:
        if self._captures_prompts:
            num_tokens = _TOKEN_WIDTH_BESIDE_DECODES // self.model_config.hidden_size
        else:
            num_weights = sum(weight.numel() for weight in self.model.model.layers.parameters())
            num_tokens = int(_FLOP_BESIDE_DECODES / (2 * num_weights))
        # A multiple of what fills the tiles of a matrix product.
        return max(num_tokens // 256 * 256, _FEWEST_TOKENS_BESIDE_DECODES)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by use."""
        weights = {parameter.data_ptr(): parameter.nbytes for parameter in self.model.parameters()}
        packed = sum(
            module.packed.nbytes for module in self.model.modules() if getattr(module, "packed", None) is not None
        )
        return {"weights": sum(weights.values()) + packed, "kv_cache": self.kv_cache.nbytes}

    def close(self) -> None:
        """Gives the device's memory back; calling it again does nothing."""
        self.graphs = self.inputs = self.model = self.kv_cache = self.state = self.backend = None
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _pack_weights(self) -> None:
        """Lets the linear layers trade their weights for a layout that the device multiplies faster."""
        for module in self.model.modules():
            if hasattr(module, "pack"):
                module.pack()


def rank_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """The device that `name` means to a rank; a RuntimeError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f'device={name!r}, but PyTorch finds no GPU; use device="cpu"')
        if size > torch.cuda.device_count():
            raise RuntimeError(
                f"tensor_parallel_size={size}, but there are {torch.cuda.device_count()} GPUs; lower it, or let "
                "CUDA_VISIBLE_DEVICES name more"
            )
        if size > 1:
            return torch.device("cuda", rank)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise RuntimeError(f"device={name!r}, but there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _dtype(wanted: str, of_checkpoint: str | None, device: torch.device) -> torch.dtype:
    if wanted == "auto":
        # CPUs compute bfloat16 slowly, and float32 loses nothing.
        wanted = "float32" if device.type == "cpu" else of_checkpoint or "bfloat16"
    dtype = getattr(torch, wanted, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'the checkpoint\'s dtype is {wanted!r}; name float32, bfloat16 or float16 with dtype="…"')
    return dtype


def _max_model_len(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return min(limit, _LONGEST_DEFAULT_MODEL_LEN)
    if wanted > limit:
        raise ValueError(f"max_model_len={wanted} exceeds the {limit} tokens that the model was made for")
    return wanted
