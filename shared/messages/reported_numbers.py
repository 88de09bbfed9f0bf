"""Names and meanings of the counters and gauges in StatusReported.

Owns the table that help texts of `/metrics` and docs/reference/metrics.md are made of; counts
nothing. Names ending in `_ms` or `_s` are milliseconds or seconds, `_bytes` are bytes. `/metrics`
exposes times in seconds.
"""

COUNTERS = {
    "cache_blocks_evicted_total": "Blocks evicted from the ranks' memory.",
    "cache_blocks_kept_total": "Blocks copied out of rows into the ranks' memory.",
    "cache_blocks_restored_total": "Blocks read from SSD and adopted.",
    "cache_blocks_spill_lost_total": "Blocks whose write to SSD failed or was dropped.",
    "cache_blocks_spilled_total": "Blocks written to SSD by all ranks.",
    "cache_checkpoints_kept_total": "Checkpoints kept in the ranks' memory.",
    "cache_hit_tokens_memory_total": "Prompt tokens found in the ranks' memory.",
    "cache_hit_tokens_ssd_total": "Prompt tokens found on SSD.",
    "cache_miss_tokens_diverged_total": "Prompt tokens computed after a difference to known text.",
    "cache_miss_tokens_end_total": "Prompt tokens computed at the end of a fully known prompt.",
    "cache_miss_tokens_evicted_total": "Prompt tokens computed because their blocks were evicted.",
    "cache_miss_tokens_new_total": "Prompt tokens computed because no known text begins like them.",
    "cache_miss_tokens_off_total": "Prompt tokens computed because the cache is off.",
    "cache_miss_tokens_slow_total": "Prompt tokens computed because a read would take longer.",
    "cache_miss_tokens_unreadable_total": "Prompt tokens computed because a rank could not read.",
    "cache_restore_answers_refused_total": "Restore answers that contradict their order.",
    "cache_restore_bytes_total": "Bytes read from SSD by all ranks.",
    "cache_restore_ms_total": "Time of restores, of the slowest rank each.",
    "cache_restores_late_total": "Restores that missed their deadline.",
    "cache_restores_total": "Restores that all ranks answered.",
    "cache_spill_bytes_total": "Bytes written to SSD by all ranks.",
    "cache_spill_ms_total": "Time of writes to SSD, summed over ranks.",
    "decode_rows_total": "Rows decoded, summed over steps.",
    "draft_tokens_read_total": "Known tokens that the ranks' draft rows read.",
    "drafted_steps_total": "Steps with drafts.",
    "epochs_total": "Epochs started.",
    "generation_tokens_total": "Tokens released to gateways.",
    "head_candidate_steps_total": "Steps sampled from candidates of a head that ranks divide.",
    "head_gathered_steps_total": "Steps for which ranks that divide the head gathered all logits.",
    "head_sent_bytes_total": "Bytes of candidates and logits that the primary rank has sent.",
    "held_plans_total": "Plans delayed until the results of drafts were back.",
    "memory_exhausted_total": "Epochs that ended because a rank ran out of device memory.",
    "preemptions_for_fairness_total": "Sequences taken off the batch for a tenant without any.",
    "preemptions_total": "Sequences taken off the batch because memory was used up.",
    "peer_silences_total": "Silences of ranks and gateways of half the time that loses them.",
    "prefill_tokens_total": "Prompt tokens computed.",
    "prompt_tokens_total": "Prompt tokens of accepted requests.",
    "receipts_mismatched_total": "Steps whose receipts differ between ranks.",
    "repeated_receipts_total": "Receipts that arrived twice.",
    "requests_accepted_total": "Requests accepted.",
    "requests_failed_total": "Requests that ended with an error.",
    "requests_finished_abort_total": "Requests aborted by their gateway.",
    "requests_finished_length_total": "Requests that reached their token limit.",
    "requests_finished_stop_total": "Requests that ended with a stop token or stop string.",
    "scheduler_cpu_ms_total": "Processor time of the scheduler's core.",
    "stale_receipts_total": "Receipts of an epoch that has ended.",
    "step_busy_ms_total": "Time during which the primary rank computed steps.",
    "step_idle_ms_total": "Time during which the primary rank waited for a plan.",
    "steps_late_total": "Steps that took more than half of their deadline.",
    "steps_total": "Steps finished in all epochs.",
    "tokens_discarded_total": "Tokens computed after the end of their sequence.",
}

GAUGES = {
    "active_tenants": "API keys, or else client addresses, with open requests.",
    "cache_blocks_known": "Blocks in the index, resident or stored.",
    "cache_blocks_known_max": "Most blocks in the index; beyond it the oldest are evicted.",
    "cache_blocks_resident": "Blocks in the ranks' memory.",
    "cache_resident_bytes": "Memory of resident blocks per rank.",
    "cache_resident_limit_bytes": "Limit of the memory of resident blocks per rank.",
    "cache_store_bytes": "Bytes of blocks on the SSDs of all hosts.",
    "decode_ms": "Measured time of a decode step of the current batch.",
    "expert_imbalance_worst": "Load of a layer's busiest expert over their mean, worst layer.",
    "expert_rank_imbalance": "Loads of each layer's busiest rank over the mean loads of ranks.",
    "expert_rank_imbalance_worst": "Load of a layer's busiest rank over their mean, worst layer.",
    "kv_budget_bytes": "Memory for KV rows of the rank with the least memory.",
    "plans_in_flight": "Step plans whose receipts are not back.",
    "prefill_token_ms": "Measured time per prompt token.",
    "row_count": "KV rows that the ranks' arrays have.",
    "row_tokens": "Tokens that each KV row holds.",
    "step_stalled_s": "Time since the oldest step in flight should have ended; 0 if none is late.",
    "tokens_in_flight": "Tokens of prompts, decodes and drafts in plans without receipts.",
    "tokens_per_second": "Tokens released per second, mean of the last two seconds.",
    "waiting_tokens": "Tokens of waiting requests.",
}


EPOCH_ENDS = {
    "rank_lost": "the connection to a rank was lost, or it was silent",
    "rank_failed": "a rank reported that it fails",
    "replaced": "a new process took the place of a rank",
    "receipts": "receipts of a step did not agree",
    "late": "a step, joining or loading took too long",
    "load": "the ranks do not fit together",
    "configuration": "the settings do not fit the model",
}
"""Why epochs end, by the part of their counters' names: `epochs_ended_late_total`."""


def meaning(name: str) -> str:
    """Return the meaning of a reported number; "" for a name that is not in the tables.

    Names of rejected requests contain their cause: `requests_rejected_queue_full_total`.
    """
    if name.startswith("requests_rejected_"):
        return "Requests rejected before they started, by cause."
    if name.startswith("epochs_ended_"):
        return "Ended epochs by cause; each end restarts all ranks."
    return COUNTERS.get(name) or GAUGES.get(name, "")
