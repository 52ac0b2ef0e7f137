"""Settings of an inner optimizer that contradict each other."""

from metattt.errors import MetaTTTError
from metattt.state import WHOLE_CALL


def check_together(mini_batch_size: int, anchor: str, read: str, steps: int, gradient_at: str) -> None:
    """Checks the settings of `InnerOptimizer` with one another.

    Raises:
        MetaTTTError: naming them, and what to set.
    """
    if steps > 1 and (read == "exclusive" or (read == "inclusive" and mini_batch_size > 1)):
        raise MetaTTTError(
            f"optimizer.steps={steps} with optimizer.read={read} would show queries the future: "
            "set optimizer.read to previous, committed, block or final, or optimizer.mini_batch_size=1"
        )
    if steps > 1 and anchor != "minibatch" and read != "final":
        raise MetaTTTError(
            f"optimizer.steps={steps} needs optimizer.anchor=minibatch (or optimizer.read=final), not {anchor}"
        )
    if mini_batch_size == WHOLE_CALL and read == "committed":
        raise MetaTTTError(
            "optimizer.mini_batch_size=null commits at the end of a call, and optimizer.read=committed shows that "
            "to its last token alone: set optimizer.read=previous or block"
        )
    if gradient_at == "decayed" and anchor != "online":
        raise MetaTTTError(
            f"optimizer.gradient_at=decayed is for token by token rules: set optimizer.anchor=online, not {anchor}"
        )
