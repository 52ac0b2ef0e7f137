"""Which tests the first tier leaves to `pytest -m ""`, beside those that say so themselves by `@pytest.mark.slow`.

An entry is the beginning of a test's id, and what the ids of the cases that stay contain; none: all are left out. The first
entry that fits counts. What stays is a sample of each group, so that a fault in what the group is about is seen at once; the other
cases are about sizes, types and combinations.
"""

from __future__ import annotations

LAWS = ("test_forms_agree", "test_splits_agree", "test_masks")
WHOLE = (
    *("TestLinear", "TestMLP", "TestWindow", "TestReconstruction"),
    *("TestGradientDescent", "TestGatedDelta", "TestBlockMomentum", "TestInnerSteps"),
)
SOME_LAYERS = ("[ttt_linear", "[ttt_mlp", "[gated_delta_net", "[titans", "[window_attention", "[lact", "[mamba2", "[mesa_net")

FIRST_TIER: dict[str, tuple[str, ...]] = {
    # every law on eight components, three on the others
    **{f"test_conformance.py::{name}::": ("",) for name in WHOLE},
    "test_conformance.py::Test": LAWS,
    "test_rows_conform.py::Test": LAWS,
    "test_fused.py::test_no_kernel_is_taken_for_what_it_does_not_compute": (),
    "test_causality.py::test_what_a_known_layer": SOME_LAYERS,
    "test_empty.py": SOME_LAYERS,
    "test_fused.py::test_equals_the_dual_form": ("-decay-100", "-plain-3"),
    "test_generation.py::test_prompts_of_different_lengths": SOME_LAYERS,
    "test_miras.py::test_laws": ("-committed", "huber", "'read': 'final'"),
    "test_omega.py::test_laws": ("[MLP-batch]", "[MLP-several steps]"),
    "test_published.py::test_prefill": ("[delta_net-", "[ttt_mlp-", "[mamba2-"),
    # interpreted Triton, and what compiles
    "test_cpu_operators.py::test_a_compiled_layer": ("[ttt_mlp]",),
    "test_cpu_operators.py::test_an_exported_layer": (),
    "test_decode_on_gpu.py::test_parts_that_vary": (),
    "test_decode_on_gpu.py::test_token_by_token": ("[mlp",),
    "test_on_gpu.py::test_compiled_in_one_graph": (),
    "test_omega.py::test_compiled_calls": (),
    "test_surroundings.py::test_compiled_in_one_graph": ("[dual]",),
    "test_ttt_linear_kernel.py::test_forward_and_every_gradient": ("chain-37-32-16", "walk-37-32-16"),
    "test_ttt_linear_kernel.py::test_chains_give_the_same_sums": (),
    "test_ttt_linear_kernel.py::test_either_pass": (),
    "test_ttt_linear_kernel.py::test_heads_further_apart": (),
    "test_ttt_linear_kernel.py::test_only_the_final_state": ("[chain]",),
    "test_ttt_linear_kernel.py::test_segments": (),
    "test_ttt_linear_kernel.py::test_compiled_whole": (),
    "test_ttt_linear_launches.py": (),
    "test_ttt_mlp_compiled.py": (),
    "test_ttt_mlp_kernel.py::test_compiles_as_one_graph": (),
    "test_ttt_mlp_kernel.py::test_forward_and_gradients": (
        "[b=8-documents=(7,8,9)]",
        "[length=17-heads=2-tau=shared]",
        "[length=20-bias=False-tau=shared-carried=True]",
    ),
    "test_ttt_mlp_kernel.py::test_operators_pass": (),
    "test_on_gpu.py::test_a_layer_through_the_triton_operation": ("[linear]",),
    "test_export.py": ("[ttt_linear]", "[attention]", "[gated_delta_net]"),
    # other libraries, other processes, attacks, long runs, sweeps, benchmarks, pages
    "robustness/test_robustness.py": (),
    "test_any_model.py": (),
    "test_benchmarks.py": (),
    "checkpoints/test_checkpoint_folder.py::test_killed_at_any_moment": ("[False]",),
    "test_classifiers.py::test_the_figures": (),
    "training/test_divergence.py": (),
    "test_documents.py::test_commands_compose": ("[README.md]", "[docs/index.md]", "[docs/tutorials"),
    "test_documents.py::test_marked_commands_run": (),
    "test_e2e.py::test_outputs_and_every_gradient": ("inner_clip=1.0", "first_order"),
    "test_e2e.py::test_it_trains": (),
    "evaluation/test_evaluation.py::test_one_checkpoint_writes": (),
    "evaluation/test_evaluation.py::test_several_checkpoints": (),
    "test_examples.py": (),
    "training/test_experiments.py::test_every_experiment_composes": ("[table1]",),
    "training/test_experiments.py::test_the_inner_learning_rate": (),
    "training/test_experiments.py::test_one_step_of_each_kind": ("[books_4k/ttt_linear_125m]",),
    "training/test_experiments.py::test_finetuning": (),
    "test_families.py::test_the_committed_page": (),
    "test_families.py::test_the_table_needs_no_torch": (),
    "evaluation/test_harness.py": (),
    "test_hf.py::test_a_published_checkpoint": (),
    "test_hf.py::test_the_text_of_metattt_generate": (),
    "test_hf_training.py": ("test_trainer_trains", "test_padding"),
    "training/test_loggers.py": (),
    "training/test_long_runs.py": (),
    "composition/test_mistakes.py::test_suggestions": ("LR=0.1", "layer=lin", "num_layers=3"),
    "test_parts.py::test_every_known_layer_prints": SOME_LAYERS,
    "data/test_prepare.py": ("test_a_split_without_documents", "test_the_shards_hold"),
    "test_published.py::test_presets_have_the_published_numbers_of_parameters": ("[125m]",),
    "training/test_runs.py::test_a_signal": ("[plain-15-3-training_step]", "[accumulated"),
    "data/test_shards_damaged.py": (),
    "training/test_stacks.py::test_the_documentation": (),
    "training/test_stacks.py::test_a_stopped_run": (),
    "training/test_stacks.py::test_a_run_is_read_converted": (),
    "data/test_stream.py::test_a_run_goes_on": ("[2]",),
    "sweeps/test_sweeps.py": (),
    "data/test_tokenizers_damaged.py": (),
    "test_truncated.py::test_": ("test_the_gradient", "test_all_chunks"),
    "test_vision.py::test_every_experiment": ("[digits_pixel/",),
    "test_vision.py::test_every_model_trains": ("[mttt_mlp-", "[self_attention-"),
    "test_vision.py::test_packages_are_attributes": (),
    "test_vision.py::test_timm_knows": (),
}


def is_left_out(nodeid: str) -> bool:
    """Whether the first tier does without a test, by its id (`tests/file.py::test[case]`)."""
    name = nodeid.rpartition("tests/")[2]
    for start, stays in FIRST_TIER.items():
        if name.startswith(start):
            return not any(part in name for part in stays)
    return False
