"""Which tests the first tier leaves to `pytest -m ""`, beside those that say so themselves by `@pytest.mark.slow`.

Each entry is a file, or the beginning of a test's id in it, and what the ids of the cases that stay contain; none: all are
left out. The first entry that fits counts. What stays samples every group, so that a fault in what a group is about is seen at once; the
other cases are about sizes, types, and combinations.
"""

from __future__ import annotations

LAWS = ("test_forms_agree[", "test_forms_agree", "test_splits", "test_causality")

FIRST_TIER: dict[str, tuple[str, ...]] = {
    # interpreted Triton, and what compiles
    "test_ttt_linear_kernel.py::test_forward_and_every_gradient": ("chain-37-32-16", "walk-37-32-16"),
    "test_ttt_mlp_compiled.py": (),
    "test_export.py": ("[ttt_linear]", "[attention]", "[gated_delta_net]"),
    # other libraries, other processes, attacks
    "test_harness.py": (),
    "test_loggers.py": (),
    "test_bench": (),
    "test_reproduce.py": (),
    "test_sweeps.py": (),
    "test_examples.py": (),
    "test_watch.py": (),
    "test_divergence.py": (),
    "test_prepare_stopped.py": (),
    "test_shards_damaged.py": (),
    "test_tokenizers_damaged.py": (),
}


def is_left_out(nodeid: str) -> bool:
    """Whether the first tier does without a test, by its id (`tests/file.py::test[case]`)."""
    name = nodeid.rpartition("tests/")[2]
    for start, stays in FIRST_TIER.items():
        if name.startswith(start):
            return not any(part in name for part in stays)
    return False
