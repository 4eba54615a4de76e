"""Small bugs that the tests must notice. Each happened, here or in an engine like this one, or could well come back.

There is a table per file of nanovllm/. It gives each bug's name, the old text, which the file holds exactly once, the
new text, and tests of which at least one must fail. A test is named by its file, without the directory, and its
function; it must be fast. Plain `pytest` plants each file's first historic bug, `pytest --long` plants all.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    old: str
    new: str
    killers: tuple[str, ...]
    is_historic: bool
    file: str = ""


def planted(name: str, old: str, new: str, *killers: str) -> Mutant:
    return Mutant(name, old, new, killers, False)


def historic(name: str, old: str, new: str, *killers: str) -> Mutant:
    """A bug that engines like this one once had."""
    return Mutant(name, old, new, killers, True)


# fmt: off
_MUTANTS_OF_FILE = {
    "engine/block_manager.py": [
        historic(
            "a wholly cached prompt leaves nothing to compute",
            "else num_tokens) - 1", "else num_tokens)",
            "test_scheduler.py::test_a_fully_cached_prompt_still_computes_one_token"),
        historic(
            "a reused block keeps its old hash",
            "        if block.hash is not None:\n            self._unregister(block)\n        if block.owner",
            "        if block.owner", "test_block_manager.py::test_a_reused_block_loses_its_old_hash"),
        planted(
            "a hash is believed although the tokens differ",
            "                or block.token_ids != seq.token_ids[index * block_size : (index + 1) * block_size]\n", "",
            "test_block_manager.py::test_a_match_needs_its_own_tokens_and_the_very_registration_before_it"),
        historic(
            "a block's hash does not cover what comes before it",
            "parent = hashes[-1] if hashes else seq.adapter.version", "parent = seq.adapter.version",
            "test_block_manager.py::test_a_block_is_known_by_everything_before_it"),
        historic(
            "the front of a prefix is evicted first",
            "self._release(seq, reversed(seq.block_table))", "self._release(seq, seq.block_table)",
            "test_block_manager.py::"
            "test_blocks_are_reused_least_recently_freed_first_and_the_front_of_a_prefix_last"),
        planted(
            "growth takes one block at most",
            "while seq.num_computed_tokens > len(seq.block_table) * self.block_size:",
            "if seq.num_computed_tokens > len(seq.block_table) * self.block_size:",
            "test_block_manager.py::test_growth_takes_as_many_blocks_as_any_number_of_tokens_needs"),
        historic(
            "a new block is appended one token early",
            "while seq.num_computed_tokens > len(seq.block_table)",
            "while seq.num_computed_tokens >= len(seq.block_table)",
            "test_block_manager.py::test_a_block_is_closed_when_it_is_full_and_the_next_appended_when_it_is_needed"),
        planted(
            "a revived block stays in the free list",
            "                del self._free[block_id]\n", "                pass\n",
            "test_block_manager.py::test_shared_blocks_in_use_cost_nothing_and_revived_ones_a_free_block"),
        historic(
            "the blocks of a step cannot be shared within it",
            "        self.register_full_blocks(seq)\n\n    def free_behind", "\n    def free_behind",
            "test_scheduler.py::test_fifteen_prompts_with_one_prefix_admitted_in_one_step_compute_it_once"),
        planted(
            "a block is registered before its last token is computed",
            "end = min(seq.num_computed_tokens, len(seq.token_ids))", "end = len(seq.token_ids)",
            "test_block_manager.py::test_every_state_of_a_small_pool_is_sound[1-1]",
            "test_block_manager.py::test_every_state_of_a_small_pool_is_sound[2-2]"),
        planted(
            "a fork does not count who shares a block",
            "        self._hold(seq)\n        seq.block_hashes", "        seq.block_hashes",
            "test_several_completions.py::test_the_prompt_is_computed_once"),
        planted(
            "what is cached is not scored",
            "(seq.next_scored if seq.next_scored < seq.end_scored else num_tokens) - 1", "num_tokens - 1",
            "test_logprobs_of_llm.py::test_a_prompt_whose_beginning_is_cached_is_scored_all_the_same"),
        historic(
            "a cached prefix comes without its state",
            "return [(prefix[-1].snapshot, seq.entry)]", "return []",
            "test_snapshots.py::test_what_waiting_requests_share_is_computed_once"),
        planted(
            "a prefix is shared beyond its last snapshot",
            "            while prefix and not prefix[-1].snapshot:\n", "            while prefix and False:\n",
            "test_snapshots.py::test_the_second_request_takes_no_snapshot_that_saves_too_little"),
        planted(
            "a snapshot stays with a block whose tokens are others now",
            "            block.snapshot = 0\n        block.hash", "        block.hash",
            "test_snapshots.py::test_a_snapshot_goes_with_its_block_and_is_the_next_to_be_reused"),
        planted(
            "a step fills a snapshot twice",
            "if block.snapshot or any(target == snapshot for _, target in copies):", "if block.snapshot:",
            "test_snapshots.py::test_a_step_fills_a_snapshot_once"),
    ],
    "engine/scheduler.py": [
        planted(
            "a row ends with the error of a row whose keys it shares",
            "if token == BROKEN_LOGITS and seq.num_shared_tokens:", "if False:",
            "test_scheduler.py::test_a_broken_row_that_shares_keys_begins_again_without_them"),
        planted(
            "completions take their own request's keys for foreign ones",
            "seq.num_shared_tokens = leader.num_shared_tokens", "pass",
            "test_scheduler.py::test_a_broken_prompt_is_computed_once_for_all_completions"),
        planted(
            "a fork does not copy the leader's state",
            "self._copy_state(step, leader, seq)", "pass",
            "test_snapshots.py::test_completions_of_one_prompt_copy_its_state_and_need_no_snapshot"),
        planted(
            "a snapshot is loaded in the step that takes it",
            "return self.block_manager.begins_too_early(seq, step.state_copies)", "return False",
            "test_snapshots.py::test_requests_that_begin_from_a_snapshot_wait_for_the_step_after_it"),
        planted(
            "a preempted sequence ends a chunk where its snapshot was due before",
            "seq.status, seq.next_stop = SequenceStatus.WAITING, NO_STOP", "seq.status = SequenceStatus.WAITING",
            "test_snapshots.py::test_a_completion_that_was_preempted_in_its_prompt_is_forked_without_a_stop"),
        planted(
            "what a broken sequence wrote is served to others",
            "            self.block_manager.forget(seq)\n", "            pass\n",
            "test_scheduler.py::test_broken_logits_end_their_row_with_an_error_and_not_the_batch"),
        historic(
            "generated blocks are never registered while steps overlap",
            "                block_manager.register_full_blocks(seq)\n", "                pass\n",
            "test_scheduler.py::test_generated_blocks_are_hit_by_later_prompts"),
        historic(
            "a preempted sequence loses the token it sampled last",
            "        seq.num_preemptions += 1\n",
            "        seq.num_preemptions += 1\n        seq.token_ids.pop()\n        seq.num_tokens -= 1\n",
            "test_scheduler.py::test_a_sequence_preempted_just_behind_a_block_boundary_keeps_its_sampled_token"),
        planted(
            "a preempted sequence is readmitted without its token in flight",
            "if self._is_admitting or seq.is_all_launched:", "if self._is_admitting:",
            "test_scheduler.py::test_a_preempted_sequence_with_a_token_in_flight_waits_for_its_commit"),
        historic(
            "the budget is counted before the cache is asked",
            "            budget -= num_new_tokens\n            self._launch",
            "            budget -= seq.num_tokens\n            self._launch",
            "test_scheduler.py::test_the_budget_of_a_readmitted_sequence_counts_only_what_is_computed"),
        planted(
            "a sequence that ends by length runs a step over",
            "num_new_tokens = min(seq.num_tokens, seq.max_num_computed, seq.next_stop)",
            "num_new_tokens = min(seq.num_tokens, seq.next_stop)",
            "test_scheduler.py::test_a_sequence_that_ends_by_length_never_runs_a_step_over"),
        historic(
            "a completion is one token too long",
            "len(known) >= seq.max_length", "len(known) > seq.max_length",
            "test_scheduler.py::test_generation_ends_exactly_at_max_model_len"),
        historic(
            "the token of the step that ran over is kept",
            "if seq.status is SequenceStatus.FINISHED or seq.pooling is not None:", "if seq.pooling is not None:",
            "test_scheduler.py::test_a_stop_token_drops_the_token_of_the_step_that_ran_over"),
        historic(
            "every chunk of a prompt samples",
            "samples = seq.num_computed_tokens == seq.num_tokens", "samples = True",
            "test_scheduler.py::test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples"),
        planted(
            "a preempted sequence keeps its entry",
            "        self.block_manager.deallocate(seq)\n        self._release_entry(seq)\n",
            "        self.block_manager.deallocate(seq)\n",
            "test_scheduler.py::test_running_sequences_have_entries_of_their_own"),
        planted(
            "admissions leave no block for the growth of what runs",
            "can_allocate(seq, len(self.running), budget)", "can_allocate(seq, 0, budget)",
            "test_scheduler.py::test_an_admission_leaves_a_block_for_the_growth_of_each_that_runs"),
        planted(
            "prompts beside decodes take the whole budget",
            "return min(budget, max(maximum - num_decodes, num_decodes))", "return budget",
            "test_scheduler.py::test_no_step_with_decodes_is_larger_than_the_cap_or_twice_its_decodes"),
        historic(
            "a stop token stops before min_tokens",
            "num_completion_tokens > seq.sampling_params.min_tokens",
            "num_completion_tokens >= seq.sampling_params.min_tokens",
            "test_scheduler.py::test_no_stop_token_stops_a_completion_before_min_tokens"),
        historic(
            "broken logits are taken for a token",
            "if token < 0:", "if token < -1:",
            "test_scheduler.py::test_broken_logits_end_their_row_with_an_error_and_not_the_batch"),
        planted(
            "siblings fork from a prompt that was computed again",
            "if samples and seq.num_computed_tokens == seq.num_prompt_tokens:", "if samples:",
            "test_scheduler.py::test_siblings_do_not_fork_from_a_leader_that_came_back"),
        planted(
            "a prompt that cannot be scored ends like any other",
            "is_broken = scored.seq.seq_id in broken", "is_broken = False",
            "test_logprobs_of_llm.py::test_a_score_from_logits_that_are_not_finite_is_an_error_row"),
        planted(
            "every row that pools ends like one that samples",
            "(seq.pooling is None or seq.pooling.needs_row_only)", "True",
            "test_one_pass.py::test_a_row_that_was_preempted_returns_each_state_once[True]"),
    ],
    "engine/sequence.py": [
        planted(
            "a row that begins again keeps the scores of its first attempt",
            "again.states, again.prompt_logprobs = [], [], [], bytearray()",
            "again.states, again.prompt_logprobs = [], [], [], self.prompt_logprobs",
            "test_broken_logits.py::test_scores_beside_a_broken_one_stay"),
        planted(
            "a row that begins again may share again",
            "SequenceStatus.WAITING, -1, NO_STOP, False", "SequenceStatus.WAITING, -1, NO_STOP, True",
            "test_scheduler.py::test_a_broken_row_that_shares_keys_begins_again_without_them"),
        planted(
            "what is cached is missing in a mean",
            'length if self.pooling.tokens == "last" else 1', "length",
            "test_one_pass.py::test_a_row_that_was_preempted_returns_each_state_once[True]"),
        planted(
            "states of layers are those of the last row alone",
            'return self.tokens == "last" and not self.layers', 'return self.tokens == "last"',
            "test_one_pass.py::test_an_output_has_vllms_shape_too"),
    ],
    "pooled_rows.py": [
        planted(
            "an embedding has more numbers than were asked for",
            "states[:, : params.dimensions]", "states",
            "test_one_pass.py::test_params_may_differ_per_prompt_and_keywords_precede_them"),
        planted(
            "a row keeps the hidden states of all rows beside it",
            "list(map(np.copy, np.stack(layers, 1)))", "list(np.stack(layers, 1))",
            "test_one_pass.py::test_an_output_keeps_no_array_of_a_whole_step[layer]"),
    ],
    "text/pairs.py": [
        planted(
            "labels of one prompt are scored from different tokens on",
            "first = min(_num_common(context.token_ids, whole.token_ids) for context, whole in some)",
            "first = max(_num_common(context.token_ids, whole.token_ids) for context, whole in some)",
            "test_one_pass.py::test_a_prompts_labels_are_scored_from_the_same_token"),
        planted(
            "the newline before an answer counts for a label that is a text",
            "iter(_encoded(pairs, encode, first_token_ids, str))",
            "iter(_encoded(pairs, encode, first_token_ids, str.rstrip))",
            "test_pooled_numbers.py::test_labels_are_as_probable_as_teacher_forcing_says"),
    ],
    "engine/waiting_queue.py": [
        historic(
            "preempted sequences come back newest first",
            "self._returned.appendleft(seq)", "self._returned.append(seq)",
            "test_scheduler.py::test_the_newest_is_preempted_and_the_oldest_comes_back_first"),
        planted(
            "sharers are not admitted together",
            "seq.seq_id if prefix_key is None else self._open_groups.setdefault(prefix_key, seq.seq_id)", "seq.seq_id",
            "test_scheduler.py::test_prompts_that_share_a_prefix_are_admitted_together"),
        planted(
            "a group that is being served takes newcomers for ever",
            "            self._close(self._served_group)\n", "            pass\n",
            "test_scheduler.py::test_newcomers_with_a_popular_prefix_cannot_keep_others_waiting"),
    ],
    "engine/step.py": [
        planted(
            "a prompt's second half scores the first token without the state before it",
            "each._replace(start=max(each.start, end + 1))", "each._replace(start=max(each.start, end))",
            "test_out_of_memory.py::test_a_prompt_alone_is_computed_in_halves_of_its_tokens"),
        planted(
            "a wrong slot is not reported",
            "if self.wrong_slot is not None:", "if False:",
            "test_cache_canary.py::test_a_wrong_key_is_found_in_the_step_that_reads_it"),
        planted(
            "a sibling is parted from the row whose logits it samples",
            "if index and chunk.num_new_tokens]", "if index]",
            "test_out_of_memory.py::test_halves_have_all_of_a_step_once_and_in_its_order"),
        planted(
            "blocks are copied before both halves have stored their keys",
            "Step.of(step.chunks[:cut], scored", "Step.of(step.chunks[:cut], step.copies, scored",
            "test_out_of_memory.py::test_halves_have_all_of_a_step_once_and_in_its_order"),
        planted(
            "single tokens behind a longer chunk are taken for decodes",
            "num_decodes += num_decodes == index", "num_decodes += 1",
            "test_scheduler.py::test_decodes_are_the_leading_chunks_of_one_new_token"),
    ],
    "runner/step_program.py": [
        planted(
            "a fork's last block is not copied",
            "self.kv_cache.tensors if step.copies else ()", "()",
            "test_several_completions.py::test_eight_completions_are_eight_requests_with_the_derived_seeds"),
        planted(
            "a captured step samples as the first one of its size did",
            'Half(("sample", num_sampled, needs),', 'Half(("sample", num_sampled),',
            "test_cuda_graph.py::test_padded_steps_give_the_tokens_of_eager_ones[torch-True-9-True-None]"),
        planted(
            "products in other parts are captured without their kernels",
            "= has_prompts, attention, *layers", "= has_prompts, attention",
            "test_cuda_graph.py::test_what_needs_other_kernels_is_of_another_kind"),
        historic(
            "the token that was sampled does not reach the next step",
            "        write_tokens(self.table.tokens, rows.entries, rows.lengths, sampled.tokens, "
            "self.use_kernels)\n",
            "", "test_sampler.py::test_a_completion_is_what_its_tokens_are_one_by_one"),
        historic(
            "padding of a captured step is given to the caller",
            "sampled = sample(sent.needs).first(num_sampled) if", "sampled = sample(sent.needs) if",
            "test_cuda_graph.py::test_padded_steps_give_the_tokens_of_eager_ones[torch-True-9-True-None]"),
        planted(
            "a step whose rows all pool samples too",
            "if has_tokens else self._no_tokens(num_sampled)", "",
            "test_one_pass.py::test_a_row_that_pools_samples_nothing"),
        planted(
            "a row that pools gets the state of a row that samples",
            "if kinds.count(kind) < len(kinds):", "if False:",
            "test_one_pass.py::test_a_row_that_samples_and_one_that_pools_have_their_own_states"),
        planted(
            "copied blocks leave their scales behind",
            "for tensor in self.kv_cache.tensors if", "for tensor in self.kv_cache.tensors[:1] if",
            "test_fp8_cache.py::test_completions_of_one_prompt_have_copies_of_its_last_block[sdpa]"),
    ],
    "runner/warm_up.py": [
        planted(
            "the first requests are taken for those of the trial step",
            "Sequence(-1 - entry, [0] * num_new_tokens", "Sequence(entry, [0] * num_new_tokens",
            "test_cuda_graph.py::test_a_trial_step_samples_all_its_prompts_with_all_there_is_within_one_block"),
        planted(
            "what a trial step leaves behind counts as free",
            "free = min(free, torch.cuda.mem_get_info(device)[0])",
            "free = max(free, torch.cuda.mem_get_info(device)[0])",
            "test_bad_input.py::test_the_step_that_is_measured_is_as_large_as_any"),
    ],
    "runner/sequence_table.py": [
        planted(
            "what rows share is not looked for again when a row is split otherwise",
            "if not np.array_equal(grouped, self._grouped):",
            "if not np.array_equal(grouped[:, :2], self._grouped[:, :2]):",
            "test_cuda_graph.py::test_shared_keys_are_looked_for_again_when_a_row_is_split_otherwise"),
        planted(
            "log-probabilities asked for as processed are raw",
            '_KINDS = {"raw": RAW, "processed": PROCESSED}', '_KINDS = {"raw": RAW, "processed": RAW}',
            "test_logprobs_of_llm.py::test_processed_log_probabilities_are_of_what_was_drawn_from"),
        historic(
            "an entry's new tenant is taken for the last one",
            "(self._tenants[rows.entries] != rows.tenants).any(1)", "self._tenants[rows.entries, 0] < 0",
            "test_sequence_table.py::test_an_entrys_last_tenant_is_forgotten",
            "test_sequence_table.py::"
            "test_the_device_knows_of_every_sequence_what_the_host_would_send[0-padded-overlap]"),
        planted(
            "a sequence that comes back to its entry keeps its old blocks",
            "(self._tenants[rows.entries] != rows.tenants).any(1)",
            "self._tenants[rows.entries, 0] != rows.tenants[:, 0]",
            "test_sequence_table.py::test_a_tenant_is_named_by_its_id_and_its_preemptions",
            "test_sequence_table.py::test_a_sequence_that_comes_back_to_its_entry_brings_its_new_blocks"),
        planted(
            "a tenant is known before all of it is sent",
            "            self._admit([step.chunks[row].seq for row in np.flatnonzero(is_new)], "
            "rows.entries[is_new])\n            self._tenants[rows.entries[is_new]] = rows.tenants[is_new]\n",
            "            self._tenants[rows.entries[is_new]] = rows.tenants[is_new]\n"
            "            self._admit([step.chunks[row].seq for row in np.flatnonzero(is_new)], "
            "rows.entries[is_new])\n",
            "test_sequence_table.py::test_what_was_not_sent_because_of_an_error_is_sent_again"),
        planted(
            "tokens of the second of two newcomers go to the wrong place",
            "np.repeat(entries * self.tokens.shape[1] - (np.cumsum(lengths) - lengths), lengths)",
            "np.repeat(entries * self.tokens.shape[1], lengths)",
            "test_sequence_table.py::test_prompts_of_three_and_four_tokens_begin_at_0_3_and_7"),
        historic(
            "padding rows belong to a sequence",
            "entry[:num_rows], entry[num_rows:] = rows.entries, self._padding_entry",
            "entry[:num_rows], entry[num_rows:] = rows.entries, 0",
            "test_sequence_table.py::test_padding_leaves_no_trace"),
        historic(
            "seeds of 64 bits lose their highest",
            "np.array([seq.seed for seq in sequences], np.uint64).view(np.int64)",
            "np.array([seq.seed & (2**63 - 1) for seq in sequences], np.int64)",
            "test_sequence_table.py::test_each_sampled_row_has_its_own_settings"),
        planted(
            "rules are applied one token too short",
            "(rows.context_lens[samples] < self._ruled_until[sampling])",
            "(rows.context_lens[samples] + 1 < self._ruled_until[sampling])",
            "test_sequence_table.py::test_stop_tokens_are_banned_until_min_tokens_have_been_generated"),
    ],
    "runner/model_runner.py": [
        planted(
            "a model with recurrent states takes its tokens twice",
            "if self.settings.parallel.size > 1 or self.program.kv_cache.states:",
            "if self.settings.parallel.size > 1:",
            "test_out_of_memory.py::test_a_model_with_states_does_not_try_again"),
        planted(
            "an update's first tensors are copied before the last is looked at",
            "self.load_update(self.check_update(given_tensors(weights)))", "self.load_update(given_tensors(weights))",
            "test_update_weights.py::test_a_bad_update_changes_nothing[one rank-unknown name]"),
        planted(
            "graphs outlive a sleep",
            "                program.graphs.clear()\n", "                pass\n",
            "test_cuda_graph.py::test_after_a_sleep_steps_are_captured_anew"),
    ],
    "sampling_params.py": [
        planted(
            "a request's parameters change while it waits",
            "    return params.clone()", "    return params",
            "test_generate_iter.py::test_a_request_keeps_the_parameters_that_it_was_read_with"),
        planted(
            "all completions of a request have its seed",
            "return mixed_seed(seed ^ _OF_COMPLETIONS, index) if index else seed", "return seed",
            "test_several_completions.py::test_completions_without_a_seed_differ_and_repeat_with_the_engines_seed"),
    ],
    "runner/step_sizes.py": [
        historic(
            "the attention of a chunk reaches beyond it",
            "num_new, seq.num_computed_tokens, samples,", "num_new, len(seq.token_ids), samples,",
            "test_sequence_table.py::test_the_attention_of_a_chunk_ends_at_the_chunk"),
    ],
    "guides.py": [
        planted(
            "a constraint that cannot go on ends its row without a word",
            "                guides[index]._fail(reason)\n", "                pass\n",
            "test_structured_outputs.py::test_a_constraint_that_cannot_go_on_ends_its_completion_with_the_reason"),
    ],
    "text/tokenizer.py": [
        planted(
            "a window cuts a character, and byte fallback spoils the others",
            "return token_ids[start : len(token_ids) - num_pending]", "return token_ids",
            "test_text.py::test_a_stop_string_is_found_among_characters_in_several_tokens"),
    ],
    "constraints.py": [
        planted(
            "a choice that begins another never ends",
            "if _END in self._node and token_id in self._eos_token_ids:", "if False:",
            "test_structured_outputs_of_llm.py::"
            "test_a_choice_that_begins_another_ends_or_goes_on_as_the_masked_model_says"),
    ],
    "runner/token_rules.py": [
        planted(
            "min_tokens bans nothing beside functions that change logits",
            "0 if seq.is_constrained and not params.logits_processors else params.min_tokens",
            "0 if seq.is_constrained else params.min_tokens",
            "test_logits_processors.py::test_a_function_that_adds_a_bias_gives_the_tokens_of_logit_bias[{}]"),
        planted(
            "masks do not reach the device",
            "        self.tensors.allowed.index_copy_(0, on_device, sent)\n", "",
            "test_structured_outputs_of_llm.py::test_a_choice_ends_where_it_is_complete_and_needs_no_end_token"),
        planted(
            "an entry's new tenant inherits its rules",
            "np.flatnonzero((until > 0) | self._is_ruled[entries])", "np.flatnonzero(until > 0)",
            "test_sequence_table.py::test_rules_hold_for_their_request_alone_and_for_all_of_its_life"),
        planted(
            "wider tensors lose the rules of those that run",
            "                (wide[:, : narrow.shape[1]] if narrow.ndim > 1 else wide).copy_(narrow)\n",
            "                pass\n",
            "test_sequence_table.py::test_rules_that_need_more_room_get_tensors_of_a_new_version"),
        planted(
            "an interrupt leaves its rules to the next tenant",
            "self._is_ruled[entries[changed]] = True", "pass",
            "test_sequence_table.py::test_rules_that_were_being_sent_when_an_error_came_are_not_the_next_tenants"),
    ],
    "engine/llm_engine.py": [
        planted(
            "states that are not finite are given to the caller",
            "broken = _keep_logprobs(committed, output) + _keep_states(committed, output)",
            "broken = _keep_logprobs(committed, output) + 0 * _keep_states(committed, output)",
            "test_one_pass.py::test_states_that_are_not_finite_make_error_rows_whose_keys_are_forgotten[mean]"),
        historic(
            "a failed step leaves its requests behind",
            "            self._empty()\n            raise\n        return finished",
            "            raise\n        return finished",
            "test_scheduler.py::test_after_a_step_that_failed_the_engine_is_empty_and_the_next_requests_are_right"),
        planted(
            "a stop predicate is asked of the token that ran over",
            "        and seq.status is not SequenceStatus.FINISHED\n", "",
            "test_scheduler.py::"
            "test_the_stop_predicate_heeds_min_tokens_itself_and_is_asked_of_no_token_after_the_end"),
        planted(
            "the cache keeps keys of the old weights",
            "        self._renew_scheduler()  # first, so that no cached key of other weights is ever read\n", "",
            "test_update_weights.py::test_no_key_of_the_old_weights_is_read[one rank]"),
        planted(
            "a stop does not reach the ranks",
            "self.runner.step_committed(stopped, broken)", "self.runner.step_committed([], broken)",
            "test_tensor_parallel.py::test_a_stop_predicate_ends_a_request_as_on_one_rank"),
    ],
    "engine/limits.py": [
        historic(
            "a prompt of exactly max_model_len is let in",
            "if num_tokens >= info.max_model_len:", "if num_tokens > info.max_model_len:",
            "test_scheduler.py::test_a_prompt_needs_room_for_one_token_within_max_model_len"),
        historic(
            "a request larger than the pool is let in",
            "if num_blocks > info.num_kvcache_blocks:", "if num_blocks > info.num_kvcache_blocks + 1:",
            "test_scheduler.py::test_a_request_that_could_never_fit_is_refused_and_the_largest_that_fits_runs"),
        planted(
            "a rule about a token outside of the vocabulary is let in",
            'if not 0 <= token_id < info.vocab_size:\n                raise ValueError(f"{name}',
            'if not 0 <= token_id <= info.vocab_size:\n                raise ValueError(f"{name}',
            "test_bad_input.py::test_a_rule_about_a_token_outside_the_vocabulary_spoils_only_its_row"),
    ],
    "ops/cache_canary.py": [
        planted(
            "new tokens begin a sum of their own",
            "written = of_new[1:] + torch.repeat_interleave(continued, num_new)", "written = of_new[1:].clone()",
            "test_cache_canary.py::test_a_workload_without_faults_never_fires[qwen3]"),
        planted(
            "a sibling's block is checked before it is copied",
            "lengths = torch.where(num_new > 0, rows.context_lens, 0).long()", "lengths = rows.context_lens.long()",
            "test_cache_canary.py::test_a_workload_without_faults_never_fires[qwen3]"),
        planted(
            "canaries of blocks behind the window are checked",
            "            is_wrong &= position > (starts - window)[row]\n", "            pass\n",
            "test_cache_canary.py::test_a_workload_without_faults_never_fires[gemma3]"),
        planted(
            "a canary forgets the position",
            "finalized((positions << 32).add_(token_ids)", "finalized((positions * 0).add_(token_ids)",
            "test_cache_canary.py::test_mix_is_the_finalizer_of_splitmix64"),
        planted(
            "the kernel checks only the new tokens",
            "    for at in range(tl.program_id(1) * WIDTH, length,", "    for at in range(length - num_new, length,",
            "test_cache_canary.py::test_the_kernels_write_and_find_what_their_twin_does"),
    ],
    "runner/kv_cache.py": [
        planted(
            "forks do not copy canaries",
            "return KVCache((*tensors, canaries), layers", "return KVCache(tensors, layers",
            "test_cache_canary.py::test_a_workload_without_faults_never_fires[qwen3]"),
    ],
    "ops/expand_rows.py": [
        historic(
            "slots wrap at 32 bits",
            "block = table.block_tables[:, entry[row], positions // block_size].long()\n",
            "block = table.block_tables[:, entry[row], positions // block_size]\n    positions = positions.int()\n",
            "test_sequence_table.py::test_slots_beyond_32_bits_do_not_wrap[plain]"),
        historic(
            "a padding token writes to the first block",
            "torch.where(is_real, block * block_size + positions % block_size, -1)",
            "torch.where(is_real, block * block_size + positions % block_size, 0)",
            "test_sequence_table.py::test_padding_leaves_no_trace[plain]"),
        planted(
            "the kernel finds the last row one halving too early",
            "num_tokens, num_sampled, num_rows.bit_length(),", "num_tokens, num_sampled, num_rows.bit_length() - 1,",
            "test_sequence_table.py::test_the_kernel_expands_rows_as_its_twin_does",
            "test_sequence_table.py::test_prompts_of_three_and_four_tokens_begin_at_0_3_and_7[kernel]"),
    ],
    "ops/write_tokens.py": [
        historic(
            "a row without a token leaves −1 to the next step",
            "sampled.clamp(min=0).int()", "sampled.int()",
            "test_sequence_table.py::test_what_a_step_sampled_is_written_behind_each_sequence[300-plain]"),
    ],
    "models/decoder.py": [
        planted(
            "states of layers lack the residual multiplier",
            "states if self.residual_multiplier == 1 else states * self.residual_multiplier", "states",
            "test_pooled_numbers.py::test_rows_of_all_kinds_equal_those_of_transformers[granite-chunks]"),
        planted(
            "the last layer keeps the keys of sampled tokens alone",
            "            metadata = [replace(of_group, query_tiles=of_group.sampled_tiles) for of_group in metadata]\n",
            "            kept = torch.full_like(metadata[0].slot_mapping, -1)\n"
            "            kept[needed] = metadata[0].slot_mapping[needed]\n"
            "            tiles = metadata[0].sampled_tiles\n"
            "            metadata = [replace(metadata[0], query_tiles=tiles, slot_mapping=kept)]\n",
            "test_last_layer.py::test_of_prompts_only_the_last_tokens_pass_the_last_layer[qwen3]"),
    ],
    "layers/sampler.py": [
        planted(
            "functions change the raw logits too",
            "logits.to(torch.float32, copy=True)", "logits",
            "test_logits_processors.py::test_raw_log_probabilities_are_those_of_the_model"),
        planted(
            "all ranks sample the first rank's rows",
            "value.narrow(0, parallel.rank * num_rows, num_rows)", "value.narrow(0, 0, num_rows)",
            "test_tensor_parallel.py::test_sampled_tokens_are_those_of_one_rank[61 ids]"),
        historic(
            "filters see the logits before the rules",
            "thresholds = filter_thresholds(logits,", "thresholds = filter_thresholds(original,",
            "test_sampler.py::test_filters_see_what_the_rules_leave"),
        planted(
            "the vocabulary's padding is sampled",
            "(exchange or parallel).rows_of_columns(columns)[:, : self._vocab.vocab_size]",
            "(exchange or parallel).rows_of_columns(columns)",
            "test_layers.py::test_collectives_and_the_lm_head_over_real_processes[2]"),
    ],
    "runner/cuda_graph.py": [
        planted(
            "a capture is not tried again",
            "                self._captured[key] = self._record(function)\n        except",
            "                raise\n        except",
            "test_cuda_graph.py::test_a_capture_without_memory_is_tried_again_when_the_cache_is_empty"),
        planted(
            "a rank does without a graph that the others have",
            "            if not self._is_alone:  #", "            if False:  #",
            "test_cuda_graph.py::test_without_memory_for_a_graph_the_function_itself_serves"),
        planted(
            "a step is tried on the rows of the next",
            "        with self._parked():\n", "        if True:\n",
            "test_cuda_graph.py::test_a_trial_leaves_no_trace_and_works_on_parked_state"),
    ],
    "ops/process_logits.py": [
        planted(
            "a ban hides a broken logit",
            "torch.where(is_allowed, out[rows], out[rows] - torch.inf)",
            "torch.where(is_allowed, out[rows], -torch.inf)",
            "test_process_logits.py::test_a_broken_logit_stays_visible"),
        planted(
            "a bad word's beginning is found in the prompt",
            "(num_generated < rules.edit_until[entries[:, 0]]) & (num_generated >= prefix_lens)",
            "(num_generated < rules.edit_until[entries[:, 0]])",
            "test_process_logits.py::test_a_bad_word_is_banned_where_the_completion_ends_with_its_prefix",
            "test_process_logits.py::test_processed_logits_equal_the_definitions"),
        planted(
            "the presence penalty looks at the prompt",
            "presence * (counts > 0)", "presence * occurs",
            "test_process_logits.py::test_penalties_look_at_prompt_and_completion_as_vllm_does",
            "test_process_logits.py::test_processed_logits_equal_the_definitions"),
        historic(
            "negative logits are divided by the repetition penalty",
            "torch.where(values > 0, values / repetition, values * repetition)", "values / repetition",
            "test_process_logits.py::test_repetition_penalty_equals_transformers"),
        planted(
            "the kernel counts on cleared memory",
            "        tl.store(counts + row * num_ids + used, 0, is_here)\n", "        pass\n",
            "test_process_logits.py::test_kernels_need_no_cleared_memory"),
    ],
    "ops/filters.py": [
        historic(
            "top-p drops the token that crosses p",
            "torch.searchsorted(mass, top_p * total)", "torch.searchsorted(mass, top_p * total).sub(1).clamp(min=0)",
            "test_filters.py::TestBoth::test_top_p_keeps_what_crosses_p_and_ties_with_it_stay"),
        planted(
            "ties with the last token of a small top-k are lost",
            "if bool((ordered[:, -1:] > ordered.gather(1, limits - 1)).all()):", "if True:",
            "test_filters.py::test_ties_with_the_last_token_of_a_small_top_k_are_all_found"),
        planted(
            "top-p is of all tokens, not of those that top-k left",
            "total = mass.gather(1, torch.searchsorted(ordered, last, right=True) - 1)", "total = mass[:, -1:]",
            "test_filters.py::TestBoth::test_top_k_and_top_p_together_renormalise"),
        planted(
            "the keys of negative numbers are in the wrong order",
            "return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT", "return bits >> SHIFT",
            "test_filters.py::test_the_kernel_keeps_the_same_set"),
    ],
    "ops/sample.py": [
        planted(
            "the upper half of a seed is ignored",
            "(seeds[:, None], seeds[:, None] >> 32)", "(seeds[:, None], seeds[:, None])",
            "test_sample.py::test_a_token_takes_its_own_word_of_its_own_block"),
        historic(
            "broken logits sample a token",
            "token_ids.where(largest < torch.inf, BROKEN_LOGITS)", "token_ids",
            "test_sample.py::test_a_row_of_broken_logits_is_flagged_and_its_neighbours_stay"),
        planted(
            "a row of which nothing is left samples a token",
            "token_ids = token_ids.where(largest > -torch.inf, NO_TOKEN_LEFT)\n", "pass\n",
            "test_sample.py::test_a_row_with_nothing_left_says_so"),
        planted(
            "NaN in the last part of a vocabulary goes unseen",
            "tl.store(tokens + row, tl.where(is_broken, BROKEN_LOGITS, best_token))",
            "tl.store(tokens + row, best_token)",
            "test_sample.py::test_a_row_of_broken_logits_is_flagged_and_its_neighbours_stay"),
    ],
    "attention/gathered_keys.py": [
        planted(
            "kept keys are gone on with although a mixed step came between",
            "(kept.lengths[places] + 1 == lengths) & (lengths <= kept.capacities[places])",
            "lengths <= kept.capacities[places]", "test_attention.py::test_kept_keys_know_their_sequence"),
    ],
    "attention/sdpa_backend.py": [
        planted(
            "a chunk's window is one key too long",
            "triu(diagonal + 1 - window)", "triu(diagonal - window)",
            "test_attention.py::test_a_query_sees_the_last_keys_of_its_window"),
        planted(
            "new keys are attended as they were before they were cached",
            "            k, v = rounded_keys(k), rounded_values(v)\n", "            pass\n",
            "test_fp8_cache.py::test_a_prompt_in_chunks_attends_as_in_one_piece[torch.float32-sdpa]",
            "test_fp8_cache.py::test_no_schedule_changes_a_token[chunks]"),
    ],
    "attention/triton_decodes.py": [
        planted(
            "results of splits before the window are merged",
            "    if WINDOW:\n        first_split = tl.maximum(length - WINDOW, 0) // split_length\n    if is_decode",
            "    if is_decode", "test_attention.py::test_a_query_sees_the_last_keys_of_its_window"),
        planted(
            "splits are merged as if all were of one weight",
            "weight = tl.where(is_read, tl.exp2(log_sum - largest[:, None]), 0.0)",
            "weight = tl.where(is_read, 1.0, 0.0)",
            "test_triton_kernels.py::test_long_sequences_have_longer_splits[0]"),
    ],
    "attention/triton_prompts.py": [
        planted(
            "layers with a window get the kernel of Hopper, which knows none",
            "    if window == 0 and has_hopper_kernel(shape, metadata.block_size):\n"
            "        from nanovllm.attention import hopper_prompts  # not",
            "    if has_hopper_kernel(shape, metadata.block_size):\n"
            "        from nanovllm.attention import hopper_prompts  # not",
            "test_triton_kernels.py::test_layers_without_a_window_get_the_kernel_of_hopper"),
        historic(
            "queries see keys of the future up to the next tile",
            "(first_position + 1) // KEYS * KEYS", "(first_position + KEYS) // KEYS * KEYS",
            "test_attention.py::test_a_prompt_in_chunks_attends_as_in_one_piece[triton]",
            "test_attention.py::test_sequences_may_share_blocks[triton]"),
    ],
    "attention/splits.py": [
        historic(
            "a decode reads beyond its last key",
            "last = tl.minimum(first + split_length, length)", "last = first + split_length",
            "test_attention.py::test_padding_behind_the_rows_and_tokens_changes_nothing",
            "test_triton_kernels.py::test_a_table_wider_than_needed_changes_nothing"),
    ],
    "attention/prefix_groups.py": [
        planted(
            "a split that a row still writes to is shared",
            "context_lens // split_length, 0)", "-(-context_lens // split_length), 0)",
            "test_prefix_groups.py::test_only_whole_splits_of_written_keys_are_shared",
            "test_prefix_groups.py::test_prefixes_may_branch_and_groups_may_be_larger_than_a_tile"),
        planted(
            "only the first tile of a large group is attended",
            "items.append((index, num_members + first,", "items.append((index, num_members,",
            "test_prefix_groups.py::test_only_whole_splits_of_written_keys_are_shared",
            "test_prefix_groups.py::test_prefixes_may_branch_and_groups_may_be_larger_than_a_tile"),
    ],
    "row_stream.py": [
        planted(
            "a row of several requests ends with the first of them",
            "if len(request.finished) == request.num_sequences:", "if request.finished:",
            "test_one_pass.py::test_labels_for_all_or_per_prompt"),
        planted(
            "a row waits for ever behind longer ones of an endless stream",
            "oldest + window - self.num_read", "window - len(self._running)",
            "test_generate_iter.py::test_a_row_waits_no_longer_than_the_window_behind_longer_ones"),
        planted(
            "rows that an emptied engine lost are not missed",
            'raise RuntimeError("somebody else aborted requests of this call, or emptied the engine")', "return",
            "test_generate_iter.py::test_an_engine_emptied_by_hand_is_noticed"),
        planted(
            "a dropped iterator leaves its requests behind",
            "            with suppress(Exception):\n                self.close()", "            pass",
            "test_generate_iter.py::test_dropping_it_aborts_what_runs"),
        planted(
            "draining drops a request of which a completion waits",
            "if all(self._engine.is_waiting(", "if any(self._engine.is_waiting(",
            "test_generate_iter.py::test_draining_keeps_all_completions_of_a_request_of_which_one_has_started"),
    ],
    "guard.py": [
        historic(
            "a call inside a call is let in",
            'frame.f_locals["self"] is self', "False",
            "test_generate_iter.py::test_the_source_may_not_call_the_llm"),
    ],
    "llm.py": [
        historic(
            "what was finished is lost with an interrupted call",
            "keep_outputs(error, outputs)", "keep_outputs(error, {})",
            "test_generate_iter.py::test_generate_keeps_what_was_finished_when_it_is_interrupted"),
    ],
    "text/text.py": [
        historic(
            "a conversation begins twice",
            "self.encode(texts, add_special_tokens=False) if marks is None", "self.encode(texts) if marks is None",
            "test_text.py::test_conversations_are_tokenized_together_whatever_their_template_kwargs"),
    ],
    "text/chat_template.py": [
        planted(
            "a document that the template leaves out is dropped without a word",
            "if mark not in text and marked[at] != given[at])", "if mark not in text and at and False)",
            "test_messages.py::test_each_tool_and_document_is_checked_in_each_conversation"),
        planted(
            "text that looks like a special token becomes one again",
            "AddedToken(of_template[token.content], special=False, **options)",
            "AddedToken(self._hidden[token.content], special=False, **options)",
            "test_text.py::test_splitting_special_tokens_changes_nothing_else"),
    ],
    "layers/linear.py": [
        historic(
            "every rank adds the bias",
            "self.bias if self.parallel.rank == 0 else None", "self.bias",
            "test_layers.py::test_row_parallel_outputs_add_up_and_the_bias_counts_once"),
        planted(
            "a product is left to a reader that takes only whole ones",
            "        if Form.UNFINISHED in self.gives and self.weight is not None and has_fused_product(",
            "        if self.weight is not None and has_fused_product(",
            "test_triton_kernels.py::test_large_products_are_left_to_the_layers_that_read_them[64]"),
    ],
    "layers/shard.py": [
        planted(
            "a packed tensor's parts all begin at its first row",
            "firsts[each.key] + each.start", "each.start",
            "test_families.py::test_teacher_forced_logits_are_those_of_transformers[sdpa-phi3]"),
    ],
    "layers/norm.py": [
        planted(
            "a large product replaces the residual",
            "residual.addmm_(x.x, x.weight.mT)", "residual.addmm_(x.x, x.weight.mT, beta=0)",
            "test_layers.py::test_a_large_fused_product_is_added_to_the_residual_while_it_is_multiplied"),
        planted(
            "ranks without an exchange sum what is not scaled",
            "Form.PLAIN if parallel.exchange is None else Form.SCALED", "Form.SCALED",
            "test_layers.py::test_ranks_with_an_exchange_leave_scales_and_rounding_to_it"),
    ],
    "ops/qk_norm_rotate_store.py": [
        planted(
            "keys are stored as values",
            "tl.where(is_normed, rotated_low, given_low)", "rotated_low",
            "test_triton_kernels.py::test_queries_and_keys_are_normed_rotated_and_stored_as_by_the_layers"),
    ],
    "layers/rotary_embedding.py": [
        planted(
            "Llama 3's slow dimensions are not interpolated",
            "    kept = kept.clamp(0, 1)\n", "    kept = kept.clamp(1, 1)\n",
            "test_families.py::test_teacher_forced_logits_are_those_of_transformers[sdpa-llama]"),
    ],
    "ops/delta_net.py": [
        planted(
            "a new sequence's convolution reads the inputs of another",
            "masked_fill_((before < 0)[..., None], 0)", "masked_fill_((before < -9)[..., None], 0)",
            "test_delta_net.py::test_padding_and_rows_without_tokens_touch_no_state[plain]"),
    ],
    "ops/delta_inputs.py": [
        planted(
            "slow decays are rounded away",
            "tl.where(rounded == 1.0, y, tl.log(rounded) * (y / (rounded - 1.0)))", "tl.log(rounded)",
            "test_delta_net.py::test_slow_decays_are_not_rounded_away[kernels]"),
    ],
    "ops/delta_decodes.py": [
        planted(
            "a new sequence begins with the last state of its entry",
            "tl.where(position > 0, KEY_DIM, 0)", "KEY_DIM",
            "test_delta_net.py::test_padding_and_rows_without_tokens_touch_no_state[kernels]"),
        planted(
            "padding rows decode",
            "if row < tl.load(num_decodes):", "if row >= 0:",
            "test_delta_net.py::test_padding_and_rows_without_tokens_touch_no_state[kernels]"),
        planted(
            "the inputs of queries and keys are not kept",
            "if head % heads_per_key == 0:", "if head < 0:",
            "test_delta_net.py::test_padding_and_rows_without_tokens_touch_no_state[kernels]"),
    ],
    "ops/delta_prompts.py": [
        planted(
            "the blocks of a tile's system are not all joined",
            "for power in range(1, 6)", "for power in range(1, 5)",
            "test_delta_net.py::test_equal_keys_are_solved_exactly[kernels]"),
        planted(
            "a tile takes the inputs before it from the ring",
            "first_new = first_position - (first_token - tl.load(cu_seqlens + row)).to(tl.int32)",
            "first_new = first_position",
            "test_delta_net.py::test_equal_keys_are_solved_exactly[kernels]"),
    ],
    "ops/route.py": [
        planted(
            "a token's weights never add up to 1",
            "    if renormalizes:\n", "    if False:\n", "test_experts.py::test_the_likeliest_experts_are_chosen"),
    ],
    "ops/grouped_mlp.py": [
        planted(
            "an expert's pairs beyond the first chunk overwrite its first ones",
            "        count += tl.sum(is_ours, 0)\n", "        count = tl.sum(is_ours, 0)\n",
            "test_experts.py::test_experts_take_more_pairs_than_one_chunk"),
        planted(
            "experts take the first one's scales",
            "of_expert = scales + expert * (tl.cdiv(OUTPUT_SIZE, ROWS) * WIDTH)", "of_expert = scales",
            "test_fp8_engines.py::test_experts_multiply_with_what_their_weights_stand_for[channel-kernel]"),
    ],
    "models/directory.py": [
        historic(
            "the index may leave the directory",
            "Path(name).name != name or ", "", "test_loader.py::test_the_index_may_not_leave_the_directory"),
    ],
    "models/loader.py": [
        historic(
            "a missing tensor goes unnoticed",
            "    if missing:\n", "    if len(missing) > 1:\n",
            "test_loader.py::test_a_missing_tensor_is_named"),
        planted(
            "a tied head keeps the old embedding",
            "            model.lm_head.unpack()\n            model.lm_head.pack()\n", "            pass\n",
            "test_update_weights.py::test_a_tied_head_follows_the_embedding[one rank]"),
        planted(
            "plain weights are written into a checkpoint's FP8",
            "if shard.target.dtype == E4M3 and shard.scales is None:",
            "if shard.target.dtype == E4M3 and shard.scales is None and tensor.dtype == E4M3:",
            "test_fp8_engines.py::test_a_checkpoint_in_fp8_is_updated_in_its_own_layout[channel]"),
    ],
    "parallel/parallel_runner.py": [
        planted(
            "one rank copies what another refuses",
            '            self._raise_refusal(self._ask("check_update", directory))\n',
            '            self._ask("check_update", directory)\n',
            "test_weights_of_ranks.py::test_what_one_rank_refuses_no_rank_does"),
    ],
    "ops/exchange.py": [
        planted(
            "a row is taken for whole once a number of it has come",
            "while tl.max(_is", "while tl.min(_is",
            "test_triton_kernels.py::test_the_exchange_is_the_sum_and_the_norm"),
        planted(
            "a mailbox is used again while another rank may still read it",
            "int(self._mailbox == 0)", "0", "test_triton_kernels.py::test_the_exchange_is_the_sum_and_the_norm"),
        planted(
            "ranks sum in 16 bits",
            "values = tl.sum(_receive(mail + at, is_real[None, :]).to(tl.float32), 0)",
            "values = tl.sum(_receive(mail + at, is_real[None, :]), 0).to(tl.float32)",
            "test_triton_kernels.py::test_ranks_sum_in_float32_and_norm_the_sum_as_it_is_kept"),
        planted(
            "an exchange that one rank lacks is used by the others",
            "return made if parallel.minimum(made is not None, device) else None", "return made",
            "test_layers.py::test_what_one_rank_cannot_make_no_rank_has"),
        planted(
            "a scaled product that goes to its owner gets another row's scale",
            "tl.load(row_scales + numbers, numbers < num_rows, 0.0)",
            "tl.load(row_scales + ranks, numbers < num_rows, 0.0)",
            "test_triton_kernels.py::test_the_exchange_takes_scaled_products_and_gives_fp8[by owner-2-11]"),
    ],
    "ops/collectives.py": [
        planted(
            "ranks add in any order",
            "if self.size > 1 and self.in_rank_order:", "if False:",
            "test_determinism.py::test_ranks_add_in_their_order"),
        planted(
            "a rank's columns are taken for its rows",
            "received.unflatten(0, (self.size, -1)).transpose(0, 1)", "received.unflatten(0, (-1, self.size))",
            "test_layers.py::test_a_model_over_several_ranks_is_the_model",
            "test_layers.py::test_collectives_and_the_lm_head_over_real_processes[2]"),
    ],
    "layers/embed_head.py": [
        historic(
            "a rank embeds the tokens of others",
            ".masked_fill_(~is_ours[:, None], 0)", "", "test_layers.py::test_a_vocabulary_of_any_size_is_divided"),
    ],
    "parallel/worker.py": [
        planted(
            "a rank changes before the others have checked",
            "self._adapter = slot, self._runner.check_adapter(slot, received_adapter(sent))",
            "self._adapter = slot, self._runner.check_adapter(slot, received_adapter(sent))\n"
            "            self._runner.load_adapter(*self._adapter)",
            "test_adapters_of_ranks.py::test_an_adapter_that_one_rank_refuses_no_rank_takes[1]"),
        planted(
            "a rank does not compare its step with the driver's",
            "if fingerprint(step) != expected:", "if False:",
            "test_tensor_parallel.py::test_a_rank_that_goes_its_own_way_ends_the_run"),
    ],
    "child_processes.py": [
        planted(
            "the place where ranks met stays behind",
            "        shutil.rmtree(path, ignore_errors=True)\n", "        pass\n",
            "test_tensor_parallel.py::test_an_engine_that_is_dropped_takes_its_ranks_along"),
    ],
    "replicas/iterator.py": [
        planted(
            "rows are error rows because they ran beside one that kills replicas",
            "_REQUESTS_AFTER_DEATHS = (16, 1)", "_REQUESTS_AFTER_DEATHS = (16, 16)",
            "test_replicas.py::test_a_row_that_kills_its_replica_becomes_one_error_row[is killed]",
            "test_replicas.py::test_a_row_that_kills_its_replica_becomes_one_error_row[raises]"),
    ],
    "jobs/journal.py": [
        historic(
            "a resumed job counts the error rows of its own run alone",
            "error = error_of(json.loads(row)) if is_error else None", "error = None",
            "test_job_journal.py::test_error_rows_are_counted_when_the_file_is_read_again"),
        historic(
            "a torn line of the journal counts",
            'return number.isdigit() and checksum == b"%08x" % zlib.crc32(row, zlib.crc32(number + b" "))',
            "return number.isdigit()", "test_job_journal.py::test_one_changed_bit_drops_its_line_and_what_follows"),
        planted(
            "two processes write one journal",
            "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
            "test_job_journal.py::test_two_processes_never_write_one_journal"),
    ],
    "jobs/identity.py": [
        planted(
            "half a file stays after Ctrl-C",
            "    except BaseException as error:\n", "    except OSError as error:\n",
            "test_jobs.py::test_what_stops_a_file_leaves_no_trace_of_it"),
        planted(
            "a changed job goes on",
            "    if changed:\n", "    if False:\n", "test_jobs.py::test_a_changed_job_is_refused_with_what_changed"),
    ],
    "jobs/proof.py": [
        planted(
            "a deterministic job goes on in another environment",
            "    if found := environment_differences(before, now):\n", "    if found := []:\n",
            "test_job_proof.py::test_a_job_goes_on_only_in_the_environment_in_which_it_began"),
        planted(
            "a manifest that was edited is read",
            '    if manifest.get("checksum") != _checksum(manifest):\n', "    if False:\n",
            "test_job_proof.py::test_a_damaged_manifest_is_refused_with_what_is_wrong[edited]"),
    ],
    "jobs/verify.py": [
        planted(
            "a row that runs alone has the data columns of another",
            "None if data is None else _ChosenData(data, frozenset(numbers))", "data",
            "test_job_proof.py::test_a_row_has_its_own_data_columns_when_it_runs_alone[lines-out.parquet]"),
    ],
    "jobs/row_params.py": [
        historic(
            "a row's seed comes from its place",
            "row_seed(self._seed, row.id)", "row_seed(self._seed, row.number)",
            "test_jobs.py::test_results_belong_to_ids_and_not_to_places"),
    ],
    "ops/layer_cache.py": [
        planted(
            "a value in FP8 has its key's scale",
            "value_scales.view(torch.int32) >> 16", "key_scales.view(torch.int32) >> 16",
            "test_fp8_cache.py::test_what_is_written_is_read_and_lies_where_the_format_says[3-4-10]"),
        planted(
            "a key's scale is rounded down, so that its largest number is too large",
            "(exact.view(torch.int32) + 0xFFFF & -0x10000)", "(exact.view(torch.int32) & -0x10000)",
            "test_fp8_cache.py::test_a_key_is_rounded_to_integers[torch.float32]"),
    ],
    "ops/store_fp8.py": [
        planted(
            "a token without a slot is written to the first of a cache in FP8",
            "slot = tl.load(slot_mapping + token, is_token, -1)",
            "slot = tl.maximum(tl.load(slot_mapping + token, is_token, -1), 0)",
            "test_fp8_cache.py::test_the_store_kernels_write_what_their_twin_writes[scattered-32-32-torch.float32]"),
    ],
    "attention/triton_fp8.py": [
        planted(
            "decodes over FP8 take the next block for a tile",
            "tl.load(block_table + start // BLOCK_SIZE)", "tl.load(block_table + start // BLOCK_SIZE + 1)",
            "test_fp8_cache.py::"
            "test_decodes_beside_prompts_attend_as_the_formula_says[2-1-32-64-0-triton-torch.float32]"),
    ],
    "layers/quantization.py": [
        planted(
            "scales of a fused layer's weights begin at its first row",
            "replace(shard, scales=scales[first_row : first_row + len(shard.target)])",
            "replace(shard, scales=scales[: len(shard.target)])",
            "test_fp8_engines.py::test_weights_that_come_in_fp8_are_those_that_we_make"),
        planted(
            "ranks divide blocks",
            "(length % block and start + length < size)", "False",
            "test_fp8.py::test_a_part_of_a_weight_is_of_whole_blocks"),
    ],
    "ops/row_invariant.py": [
        planted(
            "a product has as many rows as the step",
            "for tile in padded.split(_ROWS)]", "for tile in padded.split(len(padded))]",
            "test_determinism.py::test_a_product_in_tiles_equals_the_whole_one[100-torch.float32]"),
        planted(
            "rows of an odd size begin at any address",
            "_SIZE_MULTIPLE = 16", "_SIZE_MULTIPLE = 1",
            "test_determinism.py::test_rows_of_an_odd_size_do_not_depend_on_their_place[torch.float32]"),
        planted(
            "an activation computes its last numbers by other instructions",
            "return gate / (1 + (-gate).exp_())", "return torch.nn.functional.silu(gate)",
            "test_determinism.py::test_activations_do_not_depend_on_their_place[torch.float32-silu]"),
        planted(
            "the sum of a single row is divided between threads",
            "if len(x) > 1 else x.repeat(2, 1).sum(-1, keepdim=True)[:1]", "",
            "test_determinism.py::test_sums_of_one_row_are_those_of_several[50000]"),
    ],
    "attention/tiled_backend.py": [
        planted(
            "tiles of queries begin where their chunk begins",
            "position // num_queries], 1)", "number // num_queries], 1)",
            "test_determinism.py::test_no_schedule_changes_a_byte[qwen3-torch.bfloat16]",
            "test_attention.py::test_ragged_decodes_from_1_to_4096[tiled-torch.float32]"),
        planted(
            "a tile of queries sees the keys after it",
            "if window else distance < 0", "if window else distance < -1",
            "test_attention.py::test_page_boundaries_change_nothing[tiled-torch.float32-4]",
            "test_determinism.py::test_no_schedule_changes_a_byte[qwen3-torch.bfloat16]"),
    ],
    "runner/determinism.py": [
        planted(
            "a start compares a prompt with itself",
            "if in_chunks[-1] != [whole]:", "if False:",
            "test_determinism.py::test_a_start_finds_chunks_that_change_bits"),
    ],
    "ops/ordered_product.py": [
        planted(
            "the library multiplies numbers of rows at which it adds in another order",
            "or size not in agreed:", "or False:",
            "test_ordered.py::test_our_kernel_multiplies_few_rows_and_where_the_library_adds_in_another_order"),
    ],
    "attention/ordered_backend.py": [
        planted(
            "a decode of equal length takes another one's place",
            "((lengths == length) & (other < row))", "((lengths == length) & (other > row + 1))",
            "test_ordered.py::test_decodes_with_the_most_keys_come_first_and_padding_last"),
    ],
    "ops/quantize.py": [
        planted(
            "a row of zeros is divided by zero",
            "scales = x.abs().amax(1).float().clamp(min=_MIN_PEAK) / LARGEST",
            "scales = x.abs().amax(1).float() / LARGEST", "test_fp8.py::test_a_row_of_zeros_is_a_row_of_zeros[plain]"),
    ],
    "models/merge.py": [
        historic(
            "an adapter is added to the one before it",
            "elif name in were_changed:", "elif False:",
            "test_merged_adapters.py::test_after_20_switches_the_base_is_the_base_bit_for_bit[torch.float32]"),
        planted(
            "a layer that was unpacked before a failure stays unpacked",
            "        self._changed.update(names)\n        if isinstance(module, Packable):\n"
            "            module.unpack()\n",
            "        if isinstance(module, Packable):\n            module.unpack()\n"
            "        self._changed.update(names)\n",
            "test_merged_adapters.py::test_after_a_failure_anywhere_the_next_switch_is_exact[unpack]"),
        planted(
            "a change is rounded before it is added",
            "part.copy_(part.double().addmm_(of_part, a, alpha=change.scale))",
            "part.add_((of_part @ a * change.scale).to(part.dtype))",
            "test_adapters.py::test_a_sum_is_rounded_once[torch.bfloat16]"),
    ],
}
# fmt: on

MUTANTS = [mutant._replace(file=file) for file, mutants in _MUTANTS_OF_FILE.items() for mutant in mutants]
