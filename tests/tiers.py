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

FIRST_TIER: dict[str, tuple[str, ...]] = {
    # every law on eight components, three on the others
    **{f"test_conformance.py::{name}::": ("",) for name in WHOLE},
    "test_conformance.py::Test": LAWS,
    "test_rows_conform.py::Test": LAWS,
    "test_fused.py::test_no_kernel_is_taken_for_what_it_does_not_compute": (),
    # interpreted Triton, and what compiles
    "test_ttt_linear_kernel.py::test_forward_and_every_gradient": ("chain-37-32-16", "walk-37-32-16"),
    "test_ttt_linear_kernel.py::test_segments": (),
    "test_ttt_linear_kernel.py::test_compiled_whole": (),
    "test_ttt_mlp_compiled.py": (),
    "test_on_gpu.py::test_a_layer_through_the_triton_operation": ("[linear]",),
    "test_export.py": ("[ttt_linear]", "[attention]", "[gated_delta_net]"),
    # other libraries, other processes, attacks, long runs, sweeps, benchmarks, pages
    "test_any_model.py": (),
    "test_divergence.py": (),
    "test_documents.py::test_commands_compose": ("[README.md]", "[docs/index.md]", "[docs/tutorials"),
    "test_documents.py::test_marked_commands_run": (),
    "test_examples.py": (),
    "test_experiments.py::test_one_step_of_each_kind": ("[books_4k/ttt_linear_125m]",),
    "test_experiments.py::test_finetuning": (),
    "test_families.py::test_the_committed_page": (),
    "test_families.py::test_the_table_needs_no_torch": (),
    "test_evaluation.py::test_several_checkpoints": (),
    "test_harness.py": (),
    "test_hf.py::test_a_published_checkpoint": (),
    "test_hf_training.py": ("test_trainer_trains", "test_padding"),
    "test_loggers.py": (),
    "test_long_runs.py": (),
    "test_prepare.py": ("test_a_split_without_documents", "test_the_shards_hold"),
    "test_published.py::test_presets_have_the_published_numbers_of_parameters": ("[125m]",),
    "test_shards_damaged.py": (),
    "test_stacks.py::test_the_documentation": (),
    "test_stacks.py::test_a_stopped_run": (),
    "test_sweeps.py": (),
    "test_tokenizers_damaged.py": (),
}


def is_left_out(nodeid: str) -> bool:
    """Whether the first tier does without a test, by its id (`tests/file.py::test[case]`)."""
    name = nodeid.rpartition("tests/")[2]
    for start, stays in FIRST_TIER.items():
        if name.startswith(start):
            return not any(part in name for part in stays)
    return False
