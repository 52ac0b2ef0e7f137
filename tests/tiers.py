"""Which tests the first tier leaves to `pytest -m ""`, beside those that say so themselves by `@pytest.mark.slow`.

An entry is the beginning of a test's id, and what the ids of the cases that stay contain; none: all are left out. The first
entry that fits counts. What stays is a sample of each group, so that a fault in what the group is about is seen at once; the other
cases are about sizes, types and combinations.
"""

from __future__ import annotations

LAWS = ("test_splits", "test_masks")
WHOLE = ("TestLinear", "TestReconstruction", "TestGatedDelta")
SOME_LAYERS = ("[ttt_linear", "[ttt_mlp", "[gated_delta_net", "[titans", "[window_attention", "[lact", "[mamba2", "[mesa_net")

FIRST_TIER: dict[str, tuple[str, ...]] = {
    # every law on three components, two on the others
    **{f"test_conformance.py::{name}::": ("",) for name in WHOLE},
    "test_conformance.py::TestNextToken": (*LAWS, "test_packing"),
    "test_conformance.py::TestRows": (*LAWS, "test_packing"),
    "test_conformance.py::TestClipped": (*LAWS, "test_forms"),
    "test_conformance.py::TestNestedTTT": ("test_splits",),
    "test_conformance.py::Test": LAWS,
    "test_documents.py::Test": LAWS,
    "learners/test_adapter.py::Test": LAWS,
    "inner/test_causality.py::test_what_a_known_layer": SOME_LAYERS,
    "test_empty.py": SOME_LAYERS,
    "test_learn_and_read.py::test_learned": ("[ttt_linear", "[ttt_mlp", "[gated_delta_net", "[window_attention", "[mamba2"),
    "test_parts.py::test_parts_are_made": ("[decoded]", "[module]", "[gates]", "[block]", *SOME_LAYERS),
    "test_layer_table.py::test_laws": (*SOME_LAYERS, "[delta_gradient", "[kernel_ridge"),
    "test_layer_table.py::test_equals_the_oracle[gka-70]": (),
    "test_layer_table.py::test_equals_the_oracle[gsa-70]": (),
    "test_drawn_compositions.py::test_a_drawn_composition_equals_the_oracle[103]": (),  # of nested_ttt, as 104
    "test_whole_layers.py::test_laws[titans_ma": (),
    "learners/test_nested.py::test_three_levels": (),
    "learners/test_mesa.py::test_derivatives": ("[conjugate",),
    "kernels/test_fused.py::test_equals_the_dual_form": (
        *("[linear-plain-3", "[mlp-token steps per head-100"),
        *("[linear without bias-token steps per head-100", "[mlp without bias-plain-3"),
    ),
    "generation/test_generation.py::test_prompts_of_different_lengths": SOME_LAYERS,
    # interpreted Triton, and what compiles
    "kernels/test_cpu_operators.py::test_a_compiled_layer": (),
    "kernels/test_advance.py::test_equals_the_equations[mlp, triton": ("-32-128-", "-(0, 15, 3)-"),
    "kernels/test_cpu_operators.py::test_an_exported_layer": (),
    "kernels/test_agreement.py::test_what_does_not_agree": (),
    "kernels/test_native.py::test_a_second_process": (),
    "kernels/test_agreement.py::test_what_agrees": ("[ttt_linear",),
    "kernels/test_decode_on_gpu.py::test_token_by_token": ("[7-False-linear]",),
    "kernels/test_on_gpu.py::test_compiled_in_one_graph": (),
    "test_surroundings.py::test_compiled_": ("with_inductor",),
    "test_surroundings.py::test_learners_that_keep_data_or_a_layer_are_one_graph": ("[gated_oja",),
    "test_surroundings.py::test_a_setting_that_is_assigned": (),
    "test_surroundings.py::test_autocast_of_a_gpu": SOME_LAYERS,
    "test_surroundings.py::test_tensors_without_numbers": ("[ttt_linear]", "[gated_delta_net]", "[titans]"),
    "optimizers/test_rules_of_ones_own.py::test_settings_of_a_known": (),
    "optimizers/test_rules_of_ones_own.py::test_settings_assigned": ("[GradientDescent]", "[Momentum]", "[Block", "[ChannelDecay]"),
    "optimizers/test_rules_by_request.py::test_heads_of_another_width": ("[3-",),
    "learners/test_log_linear.py::test_decays_over_thousands": ("-sum]",),
    "test_installation.py::test_the_core_brings_no_library": (),
    "test_installation.py::test_the_extra": (),
    "composition/test_third_party.py::test_learner_of_another_package": (),
    "kernels/test_triton_operations.py::test_outputs": (
        "[ttt_linear-length=20-heads=2-bias=False-tau=shared]",
        "[ttt_linear-b=8-documents=(7,8,9)]",
        "[ttt_linear-length=17-batch=2-heads=2-tau=shared-layout=fused]",
        "[ttt_mlp-length=20-heads=2-bias=False-tau=shared]",
        "[ttt_mlp-b=8-documents=(7,8,9)]",
        "[ttt_mlp-carried=True-documents=(18,5)]",
        "[ttt_mlp-length=17-batch=2-heads=2-tau=shared-layout=fused]",
    ),
    "kernels/test_triton_operations.py::test_decoding": ("-32-True-shared]",),
    "kernels/test_triton_operations.py::test_operators_pass": (),
    "kernels/test_triton_operations.py::test_without_gradients": ("[ttt_linear]",),
    "kernels/test_on_gpu.py::test_a_layer_through_the_triton_operation": ("[linear-True-shared]",),
    "test_export.py": ("[ttt_linear]", "[gated_delta_net]", "sizes_of_a_loop"),
    # other libraries, other processes, attacks, long runs, sweeps, benchmarks, pages
    "robustness/test_robustness.py": (),
    "generation/test_any_model.py": (),
    "test_benchmarks.py": (),
    "checkpoints/test_checkpoint_folder.py::test_killed_at_any_moment": ("[False]",),
    "evaluation/test_classifiers.py::test_the_figures": (),
    "evaluation/test_classifiers.py::test_several_runs": (),
    "evaluation/test_classifiers.py::test_a_run_that_is_made_longer": (),
    "evaluation/test_evaluation.py::test_text_that_a_run": (),
    "checkpoints/test_checkpoints.py::test_eval_and_generate_import": (),
    "checkpoints/test_checkpoints.py::test_the_data_of_a_run": (),
    "checkpoints/test_checkpoints.py::test_defaults_given": (),
    "adaptation/test_adapted_models.py::test_saved_and_carried_on[ours]": (),
    "test_second_device.py::test_an_adapter": ("[all]",),
    "testing/test_foreign.py::test_a_planted_fault": ("[future]", "[split]", "[rows]", "[state]"),
    "testing/test_foreign.py::test_sound_layers_break_no_law[ttt_mlp]": (),
    "testing/test_broken_components.py::test_check_ends_with_code_1": ("Single",),
    "training/test_divergence.py": ("test_stop_names", "test_a_skipped", "does_not_recover", "named_by_layer"),
    "test_documents.py::test_commands_compose": ("[README.md]", "[docs/tutorials"),
    "test_documents.py::test_marked_commands_run": (),
    "test_documents.py::test_python_runs[docs/adaptation.md]": (),
    "models/test_language_model.py::test_blocks_that_are_run_again": ("[ttt_linear]", "[attention]"),
    "models/test_e2e.py::test_outputs_and_every_gradient": ("inner_clip=1.0", "first_order"),
    "models/test_e2e.py::test_it_trains": (),
    "models/test_e2e.py::test_a_trained_model": (),
    "evaluation/test_evaluation.py::test_curves_of_a_model_whose_blocks_are_compiled": (),
    "evaluation/test_evaluation.py::test_one_checkpoint_writes": (),
    "evaluation/test_evaluation.py::test_several_checkpoints": (),
    "test_examples.py": ("test_attached",),
    "training/test_experiments.py::test_every_experiment_composes": ("[pile_2k]", "[table1/mini_batch]"),
    "training/test_experiments.py::test_one_step_of_each_kind": ("[books_4k]",),
    "catalog/test_families.py::test_the_table_needs_no_torch": (),
    "evaluation/test_harness.py": (),
    "hf/test_hf_training.py": ("test_trainer_trains", "test_padding"),
    "training/test_loggers.py": (),
    "training/test_long_runs.py": (),
    "composition/test_mistakes.py::test_suggestions": ("LR=0.1", "layer=lin", "num_layers=3"),
    "data/test_image_data.py::test_a_run_that_ended_early": ("[0]",),
    "data/test_image_data.py::test_a_corrupt_file": ("[0]",),
    "data/test_image_data.py::test_webdataset": (),
    "data/test_novel_views.py::test_a_run_goes_on": (),
    "generation/test_prompts.py::test_many_prompts": (),
    "data/test_prepare.py": ("test_bad_settings", "test_the_shards_hold"),
    "models/test_published.py::test_convert_and_back": ("[linear_",),
    "models/test_published.py::test_presets_have_the_published_numbers_of_parameters": (),
    "models/test_published.py::test_files_that_cannot": (),
    "training/test_runs.py::test_a_signal": ("[plain-15-3-training_step]", "[accumulated-15", "[averaged"),
    "data/test_shards_damaged.py": (),
    "training/test_stacks.py::test_a_run_": (),
    "training/test_training.py::test_the_picture": (),
    "training/test_runs.py::test_killed_and_resumed": ("[2-",),
    "training/test_runs.py::test_an_older_one": (),
    "data/test_stream.py::test_a_run_goes_on": ("[2]",),
    "sweeps/test_sweeps.py": ("test_mistakes", "test_the_table", "test_any_folder", "exponent"),
    "data/test_tokenizers_damaged.py": (),
    "training/test_truncated.py::test_": ("test_the_gradient", "-5]"),
    "models/test_vision.py::test_every_experiment": ("[digits_pixel/",),
    "models/test_vision.py::test_every_model_trains": ("-mttt_mlp]", "-self_attention]"),
    "models/test_vision.py::test_packages_are_attributes": (),
    "models/test_vision.py::test_timm_knows": (),
}


def is_left_out(nodeid: str) -> bool:
    """Whether the first tier does without a test, by its id (`tests/file.py::test[case]`)."""
    name = nodeid.rpartition("tests/")[2]
    for start, stays in FIRST_TIER.items():
        if name.startswith(start):
            return not any(part in name for part in stays)
    return False


def about_nothing(nodeids: list[str]) -> list[str]:
    """Entries, and what stays of them, that fit none of all tests."""
    names, lost = [one.rpartition("tests/")[2] for one in nodeids], []
    for start, stays in FIRST_TIER.items():
        fitting = [name for name in names if name.startswith(start)]
        lost += [start] if not fitting else [f"{start} {part}" for part in stays if not any(part in x for x in fitting)]
    return lost
