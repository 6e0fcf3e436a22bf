"""The section that checks the results of kernels."""

from collections.abc import Sequence

import torch

from bench.on_gpu.bench import Bench
from bench.on_gpu.check_attention import CASES, LENGTHS, AttentionCase, Lengths, check
from bench.on_gpu.check_parts import checks
from bench.on_gpu.report import WRONG, Table

A_CASE = 8.0  # seconds of one case of attention, whose kernels are compiled first
DTYPES = ("bfloat16", "float16", "float32")


def correctness(
    bench: Bench, cases: Sequence[AttentionCase] = CASES, lengths: Lengths = LENGTHS, dtypes: tuple[str, ...] = DTYPES,
    vocabulary: int = 128_256, share: float = 0.3,
) -> None:  # fmt: skip
    """Checks all kernels.

    Args:
        bench: The run.
        cases: Cases of attention.
        lengths: Lengths of sequences in these cases.
        dtypes: Dtypes of the other kernels.
        vocabulary: Tokens of the sampler's logits.
        share: Largest share of the remaining time.
    """
    least = bench.budget.left * (1 - share)
    parts = Table("other kernels, beside float64", {
        "kernel": "", "error": ".1e", "allowed": ".0e", "of the norm": ".1e", "may be": ".0e", "verdict": "",
    })  # fmt: skip
    parts.notes.append("error: of an element, as a part of the largest magnitude (attention, sums, draws: as it is)")
    with torch.inference_mode():
        for name, work, allowed in checks(bench.device, dtypes, vocabulary):
            with parts.attempt(name):
                error = work()
                parts.add(**{
                    "kernel": name, "error": error.most, "allowed": allowed.most, "of the norm": error.norm,
                    "may be": allowed.norm, "verdict": "right" if error.within(allowed) else WRONG,
                })  # fmt: skip
        bench.report.publish(parts)
        bench.report.publish(attention_table(bench, cases, lengths, least))


def attention_table(bench: Bench, cases: Sequence[AttentionCase], lengths: Lengths, least: float) -> Table:
    """Checks the cases of attention; `least` seconds of the run must remain."""
    table = Table("attention, beside float64", {
        "case": "", "decode": ".1e", "prefill": ".1e", "allowed": ".0e", "of the norm": ".1e", "may be": ".0e",
        "verdict": "",
    })  # fmt: skip
    table.notes.append(
        "Tokens in the cache + of the step: "
        + ", ".join(f"{before} + {now}" for before, now in lengths)
        + ". Results and pages of no sequence are NaN beforehand. Right: within both tolerances, pages hold what was "
        "written and nothing else, and a decode has the same bits alone, among decodes and beside prefills (but where "
        "many share their first keys)."
    )
    for case in cases:
        if bench.budget.left < least + A_CASE:
            table.skip(case.name, "the time for this section is up")
            continue
        with table.attempt(case.name):
            found = check(case, case.lengths or lengths, bench.device)
            errors = {kind: error.most for kind, error in found.parts.items()}
            table.add(**errors, **{
                "case": case.name, "allowed": found.allowed.most, "may be": found.allowed.norm,
                "of the norm": max(error.norm for error in found.parts.values()),
                "verdict": f"{WRONG}: {'; '.join(found.problems)}" if found.problems else "right",
            })  # fmt: skip
    return table
