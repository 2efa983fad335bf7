"""Slow tests that show what a faster one shows too, each beside that one: `make test-slow` runs them.

A slow test without such a one is marked in its module. On simulated devices, all of these run.
"""

_CP = "tests/attention/context_parallel/test_exact.py::"
_STEPS = f"{_CP}test_steps_are_those_of_one_process"
_EXPERTS = "tests/experts/test_experts.py::test_every_choice_is_counted_once"
_LAYOUTS = "tests/weights/test_load.py::test_layouts_of_older_checkpoints"
_LOAD = "tests/weights/test_load.py::"
_KILL = "tests/faults/test_checkpoints.py::test_a_kill_at_a_named_moment"
_FAULTS = "tests/faults/test_checkpoints.py::"
_SYNCS = "tests/step/test_host_syncs.py::test_the_host_waits_once_in_a_step_and_once_in_an_evaluation[step]"
_WATCH = "tests/jobs/test_watchdog.py::test_the_rank_is_named_on_all_that_live_within_the_set_time"
_HEALTHY = "tests/check/test_planted.py::test_healthy_ranks_are_accused_of_nothing"
_ASKED = "tests/check/test_planted.py::test_what_is_asked_for_trains_as_in_one_process"
_DEVICE = "tests/planner/test_on_a_device.py::test_the_estimate_is_what_a_device_has_in_use"
_PACKED = "tests/shard/test_packed.py::test_steps_are_those_on_the_values"
_DEFAULT = "tests/test_default_path.py::test_evaluate_save_load_continue_export"
_SHARES = f"{_CP}test_two_ranks_share_rows"
_COMPOSED = "tests/compositions/test_compositions.py::test_a_composition_is_equal"
_PEFT = "tests/model/test_adapters.py::test_they_train_and_export_as_in_plain_peft"
_ORDERS = "tests/sac/test_ops.py::test_eager_gradients_are_bit_equal_when_sharded_in_both_orders"
_FORMAT = "tests/quantised/test_folders.py::test_every_format"
_DEVICES = "tests/weights/test_devices.py::test_a_load_is_right_on_any_device_and_stream"
_USE = "tests/planner/test_on_a_device.py::test_packed_weights_take_what_the_estimate_says"
_NOTEBOOK = "tests/test_example.py::test_every_cell_runs_and_the_model_learns"
_CUT = "tests/optimizer/test_adamw.py::test_the_result_does_not_depend_on_how_a_parameter_is_cut"
_RANDOM = "tests/process/test_random_state.py::test_no_generator_moves_unless_documented"
_PADDED = "tests/step/test_own_loss.py::test_they_train_as_padded_ones_do"
_BETWEEN = "tests/step/test_between.py::test_a_step_beside_it_is_that_of_one_process_or_refused"
_TOWERS = "tests/model/test_adapters.py::test_towers_that_no_forward_has_gathered"
_OWN_LOSS = "tests/step/test_own_loss.py::test_steps_are_those_of_one_process"
_KEPT_ACTIVATIONS = "tests/planner/test_planner.py::test_activations_are_what_a_real_model_saves"
_COMPILED = "-{'padded': True, 'backend': 'aot_eager_decomp_partition'}]"
_ASKED_FOR = ("replicas", "windows", "tied", "fp8", "compiled", "dense first", "a tower")

# Beginnings of test ids, and the test that stays.
BESIDE: dict[str, str] = {
    **{
        f"{_HEALTHY}[{case}]": f"{_HEALTHY}[cpu-2]"
        for case in ("cpu-1", "cpu-4", "cpu-8", "sim-1", "sim-2", "sim-4", "sim-8")
    },
    **{f"{_ASKED}[{feature}]": f"{_ASKED}[nf4]" for feature in _ASKED_FOR},
    # The same with more ranks, another mesh, another architecture, or a simulated device in place of the CPU.
    **{
        f"tests/shard/test_expert_parallel.py::test_a_step_is_that_of_one_process[{case}]": (
            "tests/shard/test_expert_parallel.py::test_a_step_is_that_of_one_process[MixtralForCausalLM-ours2]"
        )
        for case in (
            *("MixtralForCausalLM-ep2", "MixtralForCausalLM-ours4", "Qwen3MoeForCausalLM-ep2"),
            *("Qwen3MoeForCausalLM-ours2", "Qwen3MoeForCausalLM-ours4", "GptOssForCausalLM-ep2"),
            *("GptOssForCausalLM-ours4", "DeepseekV3ForCausalLM-ours2", "DeepseekV3ForCausalLM-ours4"),
        )
    },
    **{
        f"{_PACKED}[{kind}-{family}-{mesh}]": f"{_PACKED}[{kind}-gpt-oss-2x2]"
        for kind in ("nf4", "stored")
        for family in ("llama", "qwen3-moe", "gpt-oss", "deepseek-v3")
        for mesh in ("2", "3", "4")
    },
    # Of four families each kind keeps a mixture and one other; all of them are loaded packed elsewhere.
    **{f"{_PACKED}[{kind}-qwen3-moe-2x2]": f"{_PACKED}[{kind}-gpt-oss-2x2]" for kind in ("nf4", "stored")},
    f"{_PACKED}[nf4-deepseek-v3-2x2]": f"{_PACKED}[stored-deepseek-v3-2x2]",
    f"{_PACKED}[stored-llama-2x2]": f"{_PACKED}[nf4-llama-2x2]",
    f"{_PACKED}[fp8-qwen3-moe-2]": f"{_PACKED}[fp8-llama-2]",
    "tests/shard/test_packed.py::test_a_step_with_its_base[llama-nf4]": (
        "tests/shard/test_packed.py::test_a_step_with_its_base[qwen3-moe-nf4]"
    ),
    **{f"{_PACKED}[{kind}-qwen3-moe-1]": f"{_PACKED}[{kind}-llama-1]" for kind in ("nf4", "stored")},
    **{f"{_COMPOSED}[{index}]": f"{_COMPOSED}[0]" for index in (1, 4, 5, *range(6, 14), 15)},
    # The default path on the simulated device, where each room has its own tests on it.
    **{f"{_DEFAULT}[sim-{packed}-2]": f"{_DEFAULT}[cpu-{packed}-2]" for packed in (None, "nf4")},
    f"{_STEPS}[2-": f"{_STEPS}[4-shape2-options2]",
    f"{_CP}test_rounding_is_that_of_a_plain_process[Llama": (
        f"{_CP}test_rounding_is_that_of_a_plain_process[Gemma3ForCausalLM]"
    ),
    f"{_SHARES}[LlamaForCausalLM]": f"{_SHARES}[Gemma3ForCausalLM]",
    "tests/attention/test_hybrid.py::test_compiled_blocks_keep_rows_apart[Qwen3_5]": (
        "tests/attention/test_hybrid.py::test_compiled_blocks_keep_rows_apart[Lfm2]"
    ),
    **{
        f"{_PEFT}[{family}-False-2]": f"{_PEFT}[gpt-oss-True-2]"
        for family in ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")
    },
    **{f"{_PEFT}[{family}-True-2]": f"{_PEFT}[gpt-oss-True-2]" for family in ("qwen3-moe", "deepseek-v3")},
    **{
        f"{_FORMAT}{what}[{mesh}]": f"{_FORMAT}{what}[2]"
        for what in ("", "_stays_packed_or_is_refused")
        for mesh in ("3", "hybrid")
    },
    f"{_DEVICES}[1-": f"{_DEVICES}[0-default stream]",
    f"{_RANDOM}[cpu]": f"{_RANDOM}[simulated]",
    f"{_PADDED}[sim-": f"{_PADDED}[cpu-2]",
    f"{_BETWEEN}[any method of the root alone]": f"{_BETWEEN}[any method]",
    f"{_CUT}[sim]": f"{_CUT}[cpu]",
    **{
        f"tests/step/test_update.py::test_the_same_on_several_ranks[{case}]": (
            "tests/step/test_update.py::test_the_same_on_several_ranks[2-1-modes0]"
        )
        for case in ("2-1-modes1", "4-2-modes2")
    },
    **{
        f"tests/sac/test_ops.py::test_checkpointing_adds_no_collective[{family}]": (
            "tests/sac/test_ops.py::test_checkpointing_adds_no_collective[llama]"
        )
        for family in ("mixtral", "gpt2")
    },
    **{
        f"tests/model/test_inputs.py::test_packs_train_as_rows_alone[{family}]": (
            "tests/model/test_inputs.py::test_packs_train_as_rows_alone[llava-2]"
        )
        for family in ("mistral3-2", "internvl-2", "qwen3-vl-2", "glm4v-2", "ernie-vl-2")
    },
    **{
        f"{_TOWERS}[{case}]": f"{_TOWERS}[{case.split('-')[0]}-None]"
        for case in ("False-0", "False-1", "True-1")
    },
    "tests/test_example.py::test_a_quarter_of_the_demo_learns": (
        "tests/test_example.py::test_a_signal_saves_and_the_same_command_goes_on"
    ),
    "tests/loss/test_own.py::test_ranks_are_one_process[4-": (
        "tests/loss/test_own.py::test_ranks_are_one_process[2-shape2-packed-logits]"
    ),
    f"{_LOAD}test_load_pretrained_composes_the_steps[sim]": (
        f"{_LOAD}test_load_pretrained_composes_the_steps[cpu]"
    ),
    # All cases where a few stay; all steps until a model learns.
    f"{_USE}[all]": f"{_USE}[some]",
    f"{_NOTEBOOK}[40]": f"{_NOTEBOOK}[20]",
    "tests/optimizer/test_adamw.py::test_train_save_and_go_on_bit_for_bit[sim-": (
        "tests/optimizer/test_adamw.py::test_train_save_and_go_on_bit_for_bit[cpu-True]"
    ),
    "tests/dcp_io/test_async.py::test_async_saves_on_two_ranks[sim]": (
        "tests/dcp_io/test_async.py::test_async_saves_on_two_ranks[cpu]"
    ),
    # Four ranks where two, one rank where two, and the same with other options, show it too.
    f"{_OWN_LOSS}[dpo-2-shape1]": f"{_OWN_LOSS}[dpo-2-shape2]",
    "tests/export/test_export.py::test_the_folder_is_what_save_pretrained_writes[4]": (
        "tests/export/test_export.py::test_the_folder_is_what_save_pretrained_writes[2]"
    ),
    "tests/weights/test_new_tokens.py::test_new_rows_are_the_mean_of_the_old[4-mesh_shape2-": (
        "tests/weights/test_new_tokens.py::test_new_rows_are_the_mean_of_the_old[4-mesh_shape1-families1]"
    ),
    "tests/optimizer/test_adamw.py::test_train_save_and_go_on_bit_for_bit[cpu-False]": (
        "tests/optimizer/test_adamw.py::test_train_save_and_go_on_bit_for_bit[cpu-True]"
    ),
    **{
        f"{_KEPT_ACTIVATIONS}[{family}{_COMPILED}": f"{_KEPT_ACTIVATIONS}[llama{_COMPILED}"
        for family in ("gemma3", "mistral", "phi")
    },
    **{
        f"tests/loss/test_loss.py::test_a_window_weighs_each_target_as_asked[{ranks}-{{}}-{impl}]": (
            "tests/loss/test_loss.py::test_a_window_weighs_each_target_as_asked"
            f"[{ranks}-{{'label_smoothing': 0.1, 'z_loss': 0.001}}-{impl}]"
        )
        for ranks in (1, 2)
        for impl in ("chunked", "logits")
    },
    "tests/weights/test_account.py::test_copies_have_all_of_what_they_are_copies_of[4-": (
        "tests/weights/test_account.py::test_copies_have_all_of_what_they_are_copies_of[2-mesh_shape0]"
    ),
    "tests/weights/test_load.py::test_the_same_values_under_both_names[4-": (
        "tests/weights/test_load.py::test_the_same_values_under_both_names[2-mesh_shape0]"
    ),
    "tests/dcp_io/test_checkpoint.py::test_other_meshes[4-": (
        "tests/dcp_io/test_checkpoint.py::test_other_meshes[2-save_mesh1-4-load_mesh1]"
    ),
    "tests/dcp_io/test_checkpoint.py::test_torchs_reader_loads_a_step[4-": (
        "tests/dcp_io/test_checkpoint.py::test_torchs_reader_loads_a_step[3-save_mesh2-1]"
    ),
    "tests/loss/test_loss.py::test_gradients_equal_logits_and_cross_entropy[2-dtype1]": (
        "tests/loss/test_loss.py::test_gradients_equal_logits_and_cross_entropy[2-dtype0]"
    ),
    **{
        f"{_CP}test_attentions_heads_and_meshes[{case}]": (f"{_STEPS}[4-shape2-options2]")
        for case in ("12-4", "12-3", "8-1", "4-2", "4-4")
    },
    f"{_CP}test_training_goes_on_at_another_cp[more]": f"{_CP}test_training_goes_on_at_another_cp[1]",
    f"{_STEPS}[4-shape1-options1]": (f"{_STEPS}[4-shape2-options2]"),
    f"{_LOAD}test_bitwise_what_from_pretrained_loads[3-mesh_shape2]": (
        f"{_LOAD}test_bitwise_what_from_pretrained_loads[2-mesh_shape1]"
    ),
    f"{_LOAD}test_bitwise_what_from_pretrained_loads[4-": (
        f"{_LOAD}test_bitwise_what_from_pretrained_loads[2-mesh_shape1]"
    ),
    **{
        f"{_LAYOUTS}[{case}]": f"{_LAYOUTS}[chunk]"
        for case in ("chunk-columns", "concatenate-columns", "renamed")
    },
    **{f"{_ORDERS}[{ranks}, all]": f"{_ORDERS}[2]" for ranks in (1, 2)},
    # Compiled, where eager shows the same mistake.
    "tests/sac/test_ops.py::test_compiled_gradients_are_bit_equal[llama]": (f"{_ORDERS}[2]"),
    "tests/sac/test_ops.py::test_named_submodules_are_kept_and_the_rest_recomputed[aot_eager]": (
        "tests/sac/test_ops.py::test_named_submodules_are_kept_and_the_rest_recomputed[None]"
    ),
    f"{_EXPERTS}[1-shape4-padded-sac compile]": f"{_EXPERTS}[1-shape0-padded-sac watched first]",
    f"{_CP}test_ranks_begin_their_collectives_in_one_order": (f"{_STEPS}[4-shape2-options2]"),
    # More draws of the planner's configurations.
    **{
        f"{_DEVICE}[{case}-0]": f"{_DEVICE}[cut_case-0]"
        for case in ("random_case", "shared_case", "experts_case", "shared_out_case", "stochastic_case")
    },
    **{
        f"tests/planner/test_search.py::test_more_memory_never_gives_a_slower_plan[{index}]": (
            "tests/planner/test_search.py::test_more_memory_never_gives_a_slower_plan[0]"
        )
        for index in range(3, 8)
    },
    # Whole loops of others, and launchers beyond torchrun.
    "tests/ports/test_training.py::": (
        "tests/test_default_path.py::test_evaluate_save_load_continue_export[cpu-None-2]"
    ),
    "tests/ranks/test_launch.py::test_torchrun_trains_as_plain_python_does": (
        "tests/ranks/test_distributed.py::test_torchrun"
    ),
    # Processes that are killed at every moment, or in every way, of which some stay.
    **{
        f"{_KILL}[{moment}]": f"{_KILL}[mid-manifest]"
        for moment in ("before data", "mid-data", "after data", "mid-prune")
    },
    f"{_FAULTS}test_kills_at_random_moments": f"{_KILL}[before rename]",
    f"{_WATCH}[save-3]": f"{_WATCH}[ahead-2]",
    **{
        f"tests/jobs/test_preemption.py::test_a_loaders_workers_outlive_the_signal[{case}]": (
            "tests/jobs/test_preemption.py::test_a_loaders_workers_outlive_the_signal[fork-watched]"
        )
        for case in ("spawn-plain", "forkserver-plain", "fork-plain")
    },
    "tests/sampling/packing/test_packs.py::test_no_rank_waits_long[32768-": (
        "tests/sampling/packing/test_packs.py::test_no_rank_waits_long[4096-8-10000-1.01]"
    ),
    # The code of pages: every block is looked at by ``test_every_python_block_is_run_or_marked``.
    **{
        f"tests/test_docs.py::test_the_blocks_of_a_page_run[docs/{pages}": (
            "tests/test_docs.py::test_the_blocks_of_a_page_run[docs/quickstart.md]"
        )
        for pages in ("explanation/", "how-to/", "tutorials/")
    },
    # The simulator itself: what it computes is compared by every test that uses it.
    "tests/simulated/test_device.py::": _SYNCS,
}


def fast_one(test: str) -> str | None:
    """The test that stays in ``make test`` in the place of a slow one; None for any other."""
    return next((kept for start, kept in BESIDE.items() if test.startswith(start)), None)
