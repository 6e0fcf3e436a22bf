"""Plans and outputs as bytes, so that two runs can be held against each other."""

from scheduler.events import StepOutputs
from scheduler.step import StepPlan


def plan_bytes(plan: StepPlan) -> bytes:
    """All of a plan, types and shapes included."""
    joins = [
        (j.row, j.tokens.dtype.str, j.tokens.tobytes(), j.prompt_count, repr(j.controls), j.index) for j in plan.joins
    ]
    arrays = (plan.leaves, plan.grown, plan.copies, plan.freed, plan.slices, plan.logits, plan.forced, plan.jumps)
    return repr((plan.step, joins, [(a.dtype.str, a.shape, a.tobytes()) for a in arrays])).encode()


def output_bytes(outputs: StepOutputs) -> bytes:
    """All of a step's outputs, types and shapes included."""
    probs = outputs.logprobs
    arrays = (
        outputs.attempts,
        outputs.indices,
        outputs.positions,
        outputs.tokens,
        probs.chosen,
        probs.rank,
        probs.top_ids,
        probs.top,
    )
    rest = (outputs.starts, outputs.ends, outputs.stats, outputs.step_seconds)
    return repr(([(a.dtype.str, a.shape, a.tobytes()) for a in arrays], rest)).encode()
