"""Small bugs that the tests must notice, many of them bugs that engines like this one once had.

Each is (what breaks, file in nanovllm/, old text, new text, tests of which at least one must fail). The old text
must stand in the file exactly once. The tests must be fast ones: the slowest take seconds, most of it for torch.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]


BLOCK_MANAGER = "engine/block_manager.py"
SCHEDULER = "engine/scheduler.py"
ENGINE = "engine/llm_engine.py"
BATCH = "engine/batch.py"
SAMPLER = "layers/sampler.py"
LINEAR = "layers/linear.py"
SDPA = "kernels/sdpa_attention.py"
PACKED = "kernels/packed_linear.py"
LOADER = "utils/loader.py"

MUTANTS = [
    # Block manager
    Mutant(
        "a wholly cached prompt leaves nothing to compute",
        BLOCK_MANAGER,
        "for index in range((len(seq.token_ids) - 1) // block_size):",
        "for index in range(len(seq.token_ids) // block_size):",
        ("test_scheduler.py::test_a_fully_cached_prompt_still_computes_one_token",),
    ),
    Mutant(
        "a reused block keeps its old hash",
        BLOCK_MANAGER,
        "        if block.hash is not None:\n            self._unregister(block)\n        block.ref_count = 1",
        "        block.ref_count = 1",
        ("test_block_manager.py::test_a_reused_block_loses_its_old_hash",),
    ),
    Mutant(
        "a hash is believed although the tokens differ",
        BLOCK_MANAGER,
        "                or block.token_ids != seq.token_ids[index * block_size : (index + 1) * block_size]\n",
        "",
        ("test_block_manager.py::test_a_match_needs_its_own_tokens_and_the_very_registration_before_it",),
    ),
    Mutant(
        "a hash is believed although the prefix differs",
        BLOCK_MANAGER,
        "                or block.parent != parent\n",
        "",
        ("test_block_manager.py::test_a_match_needs_its_own_tokens_and_the_very_registration_before_it",),
    ),
    Mutant(
        "a registration is taken for its equal although the prefix differs",
        BLOCK_MANAGER,
        "found is not None and found.parent == seq.last_registration and found.token_ids",
        "found is not None and found.token_ids",
        ("test_block_manager.py::test_a_block_is_not_registered_behind_the_equal_of_its_parent_in_another_prefix",),
    ),
    Mutant(
        "a block's hash does not cover what comes before it",
        BLOCK_MANAGER,
        "self._block_hash(hashes[-1] if hashes else 0, ",
        "self._block_hash(0, ",
        ("test_block_manager.py::test_a_block_is_known_by_everything_before_it",),
    ),
    Mutant(
        "prefixes are hashed again with every question",
        BLOCK_MANAGER,
        "hashes, block_size = seq.block_hashes, self.block_size",
        "hashes, block_size = list(seq.block_hashes), self.block_size",
        ("test_block_manager.py::test_each_prefix_is_hashed_once_a_request",),
    ),
    Mutant(
        "the front of a prefix is evicted first",
        BLOCK_MANAGER,
        "for block_id in reversed(seq.block_table):",
        "for block_id in seq.block_table:",
        ("test_block_manager.py::test_blocks_are_reused_least_recently_freed_first_and_the_front_of_a_prefix_last",),
    ),
    Mutant(
        "the most recently freed block is reused first",
        BLOCK_MANAGER,
        "self._free.popitem(last=False)",
        "self._free.popitem()",
        ("test_block_manager.py::test_blocks_are_reused_least_recently_freed_first_and_the_front_of_a_prefix_last",),
    ),
    Mutant(
        "growth takes one block at most",
        BLOCK_MANAGER,
        "while seq.num_computed_tokens > len(seq.block_table) * self.block_size:",
        "if seq.num_computed_tokens > len(seq.block_table) * self.block_size:",
        ("test_block_manager.py::test_growth_takes_as_many_blocks_as_any_number_of_tokens_needs",),
    ),
    Mutant(
        "a new block is appended one token early",
        BLOCK_MANAGER,
        "while seq.num_computed_tokens > len(seq.block_table)",
        "while seq.num_computed_tokens >= len(seq.block_table)",
        ("test_block_manager.py::test_a_block_is_closed_when_it_is_full_and_the_next_appended_when_it_is_needed",),
    ),
    Mutant(
        "shared blocks are counted as if they cost something",
        BLOCK_MANAGER,
        "return num_needed - num_shared <= num_available",
        "return num_needed <= num_available",
        ("test_block_manager.py::test_shared_blocks_in_use_cost_nothing_and_revived_ones_a_free_block",),
    ),
    Mutant(
        "revived blocks are counted as if they cost nothing",
        BLOCK_MANAGER,
        "sum(block.ref_count > 0 for block in self._cached_prefix(seq))",
        "len(self._cached_prefix(seq))",
        ("test_block_manager.py::test_shared_blocks_in_use_cost_nothing_and_revived_ones_a_free_block",),
    ),
    Mutant(
        "a revived block stays in the free list",
        BLOCK_MANAGER,
        "                del self._free[block.block_id]\n",
        "                pass\n",
        ("test_block_manager.py::test_shared_blocks_in_use_cost_nothing_and_revived_ones_a_free_block",),
    ),
    Mutant(
        "the blocks of a step cannot be shared within it",
        BLOCK_MANAGER,
        "            seq.block_table.append(self._take_free_block())\n        self.register_full_blocks(seq)",
        "            seq.block_table.append(self._take_free_block())",
        ("test_scheduler.py::test_fifteen_prompts_with_one_prefix_admitted_in_one_step_compute_it_once",),
    ),
    Mutant(
        "a block is registered before its last token is computed",
        BLOCK_MANAGER,
        "end = min(seq.num_computed_tokens, len(seq.token_ids))",
        "end = len(seq.token_ids)",
        (
            "test_block_manager.py::test_every_state_of_a_small_pool_is_sound[1-1]",
            "test_block_manager.py::test_every_state_of_a_small_pool_is_sound[2-2]",
        ),
    ),
    Mutant(
        "a block is registered before its last token is known",
        BLOCK_MANAGER,
        "end = min(seq.num_computed_tokens, len(seq.token_ids))",
        "end = seq.num_computed_tokens",
        ("test_scheduler.py::test_generated_blocks_are_hit_by_later_prompts",),
    ),
    Mutant(
        "what a broken sequence wrote is served to others",
        SCHEDULER,
        "            self.block_manager.forget(seq)\n",
        "            pass\n",
        ("test_scheduler.py::test_broken_logits_end_their_row_with_an_error_and_not_the_batch",),
    ),
    # Scheduler
    Mutant(
        "generated blocks are never registered while steps overlap",
        SCHEDULER,
        "                block_manager.register_full_blocks(seq)\n",
        "                pass\n",
        ("test_scheduler.py::test_generated_blocks_are_hit_by_later_prompts",),
    ),
    Mutant(
        "a preempted sequence loses the token it sampled last",
        SCHEDULER,
        "        seq.num_preemptions += 1\n",
        "        seq.num_preemptions += 1\n        seq.token_ids.pop()\n        seq.num_tokens -= 1\n",
        ("test_scheduler.py::test_a_sequence_preempted_just_behind_a_block_boundary_keeps_its_sampled_token",),
    ),
    Mutant(
        "a preempted sequence is readmitted without its token in flight",
        SCHEDULER,
        "            if seq.has_token_in_flight:\n                return\n",
        "",
        ("test_scheduler.py::test_a_preempted_sequence_with_a_token_in_flight_waits_for_its_commit",),
    ),
    Mutant(
        "the budget is counted before the cache is asked",
        SCHEDULER,
        "num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)\n            budget -= num_new_tokens",
        "num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)\n            budget -= seq.num_tokens",
        ("test_scheduler.py::test_the_budget_of_a_readmitted_sequence_counts_only_what_is_computed",),
    ),
    Mutant(
        "the oldest sequence is preempted",
        SCHEDULER,
        "newest = running.pop()",
        "newest = running.pop(0)",
        ("test_scheduler.py::test_the_newest_is_preempted_and_the_oldest_comes_back_first",),
    ),
    Mutant(
        "preempted sequences come back newest first",
        SCHEDULER,
        "self._returned.appendleft(seq)",
        "self._returned.append(seq)",
        ("test_scheduler.py::test_the_newest_is_preempted_and_the_oldest_comes_back_first",),
    ),
    Mutant(
        "a sequence that ends by length runs a step over",
        SCHEDULER,
        "min(seq.num_tokens, seq.max_length - 1) - seq.num_computed_tokens",
        "seq.num_tokens - seq.num_computed_tokens",
        ("test_scheduler.py::test_a_sequence_that_ends_by_length_never_runs_a_step_over",),
    ),
    Mutant(
        "a completion is one token too long",
        SCHEDULER,
        "len(token_ids) >= seq.max_length",
        "len(token_ids) > seq.max_length",
        ("test_scheduler.py::test_generation_ends_exactly_at_max_model_len",),
    ),
    Mutant(
        "the token of the step that ran over is kept",
        SCHEDULER,
        "            if seq.status is SequenceStatus.FINISHED:\n                continue\n",
        "",
        ("test_scheduler.py::test_a_stop_token_drops_the_token_of_the_step_that_ran_over",),
    ),
    Mutant(
        "every chunk of a prompt samples",
        SCHEDULER,
        "samples = seq.num_computed_tokens == seq.num_tokens",
        "samples = True",
        ("test_scheduler.py::test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples",),
    ),
    Mutant(
        "a preempted sequence keeps its slot",
        SCHEDULER,
        "        self.block_manager.deallocate(seq)\n        self._release_slot(seq)\n",
        "        self.block_manager.deallocate(seq)\n",
        ("test_scheduler.py::test_running_sequences_have_slots_of_their_own",),
    ),
    Mutant(
        "admissions leave no block for the growth of what runs",
        SCHEDULER,
        "can_allocate(seq, len(self.running))",
        "can_allocate(seq, 0)",
        ("test_scheduler.py::test_an_admission_leaves_a_block_for_the_growth_of_each_that_runs",),
    ),
    Mutant(
        "admissions trickle in one at a time",
        SCHEDULER,
        "is_too_early = num_free_places < num_to_gather or",
        "is_too_early = num_free_places < 1 or",
        ("test_scheduler.py::test_admissions_are_gathered_while_decode_is_busy",),
    ),
    Mutant(
        "an admission that the budget cut short does not go on",
        SCHEDULER,
        "                self._is_admitting = True\n",
        "                pass\n",
        ("test_scheduler.py::test_an_admission_that_the_budget_cut_short_goes_on_with_the_next_step",),
    ),
    Mutant(
        "the last few prompts wait for more places than they need",
        SCHEDULER,
        "gather = min(max(min(16, self.max_num_seqs // 4), num_running // 8), len(self.waiting))",
        "gather = max(min(16, self.max_num_seqs // 4), num_running // 8)",
        ("test_scheduler.py::test_the_last_prompts_are_admitted_as_soon_as_there_are_places_for_all_of_them",),
    ),
    Mutant(
        "sharers are not admitted together",
        SCHEDULER,
        "seq.seq_id if prefix_key is None else self._open_groups.setdefault(prefix_key, seq.seq_id)",
        "seq.seq_id",
        ("test_scheduler.py::test_prompts_that_share_a_prefix_are_admitted_together",),
    ),
    Mutant(
        "a group that is being served takes newcomers for ever",
        SCHEDULER,
        "            self._close(self._group_of[seq.seq_id])\n",
        "            pass\n",
        ("test_scheduler.py::test_newcomers_with_a_popular_prefix_cannot_keep_others_waiting",),
    ),
    Mutant(
        "a full cache lets sequences in one at a time",
        SCHEDULER,
        "self._num_free_blocks_wanted = min(block_manager.num_free_blocks + num_blocks // 16 + 1, num_blocks)",
        "pass",
        ("test_scheduler.py::test_admissions_are_gathered_when_blocks_are_what_is_short",),
    ),
    Mutant(
        "a stop token stops before min_tokens",
        SCHEDULER,
        "num_completion_tokens > min_tokens",
        "num_completion_tokens >= min_tokens",
        ("test_scheduler.py::test_nothing_stops_a_completion_before_min_tokens",),
    ),
    Mutant(
        "broken logits are taken for a token",
        SCHEDULER,
        "if token < 0:",
        "if token < -1:",
        ("test_scheduler.py::test_broken_logits_end_their_row_with_an_error_and_not_the_batch",),
    ),
    Mutant(
        "an aborted request stays in the running list",
        SCHEDULER,
        "            if remove:\n                self.running.remove(seq)\n",
        "",
        ("test_scheduler.py::test_an_abort_ends_waiting_running_and_in_flight_requests_at_once",),
    ),
    # The loop
    Mutant(
        "a failed step leaves its requests behind",
        ENGINE,
        "        except BaseException:\n            self.reset()\n            raise\n",
        "        except BaseException:\n            raise\n",
        ("test_scheduler.py::test_after_a_step_that_failed_the_engine_is_empty_and_the_next_requests_are_right",),
    ),
    Mutant(
        "an interrupt leaves its requests behind",
        ENGINE,
        "except BaseException:",
        "except Exception:",
        ("test_scheduler.py::test_after_a_step_that_failed_the_engine_is_empty_and_the_next_requests_are_right",),
    ),
    Mutant(
        "a prompt of exactly max_model_len is let in",
        ENGINE,
        "if num_tokens >= info.max_model_len:",
        "if num_tokens > info.max_model_len:",
        ("test_scheduler.py::test_a_prompt_needs_room_for_one_token_within_max_model_len",),
    ),
    Mutant(
        "a request larger than the pool is let in",
        ENGINE,
        "if num_blocks > info.num_kvcache_blocks:",
        "if num_blocks > info.num_kvcache_blocks + 1:",
        ("test_scheduler.py::test_a_request_that_could_never_fit_is_refused_and_the_largest_that_fits_runs",),
    ),
    # Batch
    Mutant(
        "the attention of a chunk reaches beyond it",
        BATCH,
        "context_lens = np.fromiter((seq.num_computed_tokens for",
        "context_lens = np.fromiter((len(seq.token_ids) for",
        ("test_batch.py::test_the_attention_of_a_chunk_ends_at_the_chunk",),
    ),
    Mutant(
        "positions of a chunk begin at 0",
        BATCH,
        "positions = np.arange(cu_seqlens_q[-1]) + (starts - cu_seqlens_q[:-1])[row]",
        "positions = np.arange(cu_seqlens_q[-1]) - cu_seqlens_q[:-1][row]",
        ("test_batch.py::test_the_attention_of_a_chunk_ends_at_the_chunk",),
    ),
    Mutant(
        "a sequence samples from its neighbour's first token",
        BATCH,
        "cu_seqlens_q[1:][samples] - 1",
        "cu_seqlens_q[1:][samples]",
        ("test_batch.py::test_prompts_of_three_and_four_tokens_begin_at_0_3_and_7",),
    ),
    Mutant(
        "slots wrap at 32 bits",
        BATCH,
        ".astype(np.int64) * block_size",
        ".astype(np.int32) * np.int32(block_size)",
        ("test_batch.py::test_slots_beyond_32_bits_do_not_wrap",),
    ),
    # Sampler, attention, layers, loader
    Mutant(
        "top-p drops the token that crosses p",
        SAMPLER,
        "mass_before = probs.cumsum(-1) - probs",
        "mass_before = probs.cumsum(-1)",
        ("test_sampler.py::test_top_p_keeps_the_token_that_crosses_p_and_ties_go_to_the_lowest_id",),
    ),
    Mutant(
        "the upper half of a seed is ignored",
        SAMPLER,
        "(seeds[:, None], seeds[:, None] >> 32)",
        "(seeds[:, None], seeds[:, None])",
        ("test_sampler.py::test_the_same_seed_gives_the_same_tokens_and_another_seed_gives_others",),
    ),
    Mutant(
        "broken logits sample a token",
        SAMPLER,
        "return token_ids.where(largest.isfinite(), -1)",
        "return token_ids",
        ("test_sampler.py::test_a_row_of_broken_logits_is_minus_one_and_its_neighbours_stay",),
    ),
    Mutant(
        "padding of a decode reads another sequence's slots",
        SDPA,
        "np.where(position < lengths[:, None], position, 0)",
        "np.broadcast_to(position, (len(lengths), capacity))",
        ("test_attention.py::test_ragged_decodes_from_1_to_4096",),
    ),
    Mutant(
        "kept keys are gone on with although a mixed step came between",
        SDPA,
        "(kept.lengths[places] + 1 == lengths) & (lengths <= kept.capacities[places])",
        "lengths <= kept.capacities[places]",
        ("test_attention.py::test_kept_keys_know_their_sequence",),
    ),
    Mutant(
        "kept keys outgrow their room",
        SDPA,
        " & (lengths <= kept.capacities[places])\n",
        "\n",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "a new key is appended a row too late",
        SDPA,
        "gathered.lengths - 1)[places, None]",
        "gathered.lengths)[places, None]",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "the new keys of all heads go to adjacent rows",
        SDPA,
        "np.arange(num_kv_heads) * gathered.capacities[places, None]",
        "np.arange(num_kv_heads)",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "a kept sequence is taken for its neighbour",
        SDPA,
        "dict(zip(ids, places.tolist(), strict=True))",
        "dict(zip(ids, range(len(ids)), strict=True))",
        ("test_attention.py::test_keys_kept_from_step_to_step_are_those_in_the_cache[0-torch.float32]",),
    ),
    Mutant(
        "kept keys do not grow",
        SDPA,
        "            gathered.lengths[places] = lengths[decodes]\n",
        "",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "queries meet the kept keys in batch order",
        SDPA,
        "place_rows[places] = rows\n",
        "place_rows[: len(rows)] = rows\n",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "layers share their kept keys",
        SDPA,
        ", head_dim, buffer=layer)",
        ", head_dim)",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "sequences without names are taken for one another",
        SDPA,
        "ids = None if prefills or context.seq_ids is None else [context.seq_ids[row] for row in decodes]",
        "ids = None if prefills else [(context.seq_ids or range(99))[row] for row in decodes]",
        ("test_attention.py::test_nothing_is_kept_of_sequences_without_names",),
    ),
    Mutant(
        "kept keys take any memory",
        SDPA,
        "if not plan.may_keep or plan.source_rows.numel() * head_dim > _MOST_KEPT * k_cache.numel():",
        "if not plan.may_keep:",
        ("test_attention.py::test_a_copy_that_would_take_much_of_the_memory_is_not_kept",),
    ),
    Mutant(
        "a kept copy of a large batch outlives it",
        SDPA,
        " or len(ids) < _FEWEST_STILL_RUNNING * len(kept.lengths)",
        "",
        ("test_attention.py::test_a_finished_sequence_is_read_on_only_while_most_others_run",),
    ),
    Mutant(
        "keys are gathered again in every other step",
        SDPA,
        "gathered = self._kept = kept\n",
        "gathered = kept\n",
        ("test_attention.py::test_keys_are_kept_until_there_is_no_room_for_another",),
    ),
    Mutant(
        "queries of a long chunk after the first mask see too little",
        SDPA,
        "tril(num_before + first)",
        "tril(num_before)",
        ("test_attention.py::test_long_prompts_and_chunks_of_them",),
    ),
    Mutant(
        "oneDNN keeps a kernel for every number of rows",
        PACKED,
        "_ROWS[bisect_left(_ROWS, num_rows)]",
        "num_rows",
        ("test_packed_linear.py::test_any_number_of_rows_is_computed_in_few_sizes",),
    ),
    Mutant(
        "oneDNN keeps a kernel for every number of rows of a long prompt",
        PACKED,
        "torch.cat([packed_linear(part, packed, bias) for part in x.split(_ROWS[-1])])",
        'torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")',
        ("test_packed_linear.py::test_any_number_of_rows_is_computed_in_few_sizes",),
    ),
    Mutant(
        "every rank adds the bias",
        LINEAR,
        "self.bias if self.parallel.rank == 0 else None",
        "self.bias",
        ("test_layers.py::test_row_parallel_outputs_add_up_and_the_bias_counts_once",),
    ),
    Mutant(
        "a tensor in two files is loaded twice",
        LOADER,
        "                if name in seen:\n",
        "                if False:\n",
        ("test_loader.py::test_a_tensor_in_two_files_is_named_with_both",),
    ),
    Mutant(
        "the index may leave the directory",
        LOADER,
        "Path(name).name != name or ",
        "",
        ("test_loader.py::test_the_index_may_not_leave_the_directory",),
    ),
    Mutant(
        "a missing tensor goes unnoticed",
        LOADER,
        "        if missing:\n",
        "        if len(missing) > 1:\n",
        ("test_loader.py::test_a_missing_tensor_is_named",),
    ),
]
