"""The section that says whether kernels are right."""

from collections.abc import Sequence

import torch

from bench.on_gpu.bench import Bench
from bench.on_gpu.check_attention import CASES, LENGTHS, Case, Lengths, check
from bench.on_gpu.check_parts import checks
from bench.on_gpu.report import WRONG, Table

A_CASE = 8.0  # seconds of one case of attention, whose kernels are compiled first
DTYPES = ("bfloat16", "float16", "float32")


def correctness(
    bench: Bench, cases: Sequence[Case] = CASES, lengths: Lengths = LENGTHS, dtypes: tuple[str, ...] = DTYPES,
    vocabulary: int = 128_256, share: float = 0.3,
) -> None:  # fmt: skip
    """share: of the time that is left, at most."""
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
                    "kernel": name, "error": error.most, "allowed": allowed.most, "of the norm": error.whole,
                    "may be": allowed.whole, "verdict": "right" if error.within(allowed) else WRONG,
                })  # fmt: skip
        bench.report.tell(parts)
        bench.report.tell(attention_table(bench, cases, lengths, least))


def attention_table(bench: Bench, cases: Sequence[Case], lengths: Lengths, least: float) -> Table:
    """least: seconds that are to be left."""
    table = Table("attention, beside float64", {
        "case": "", "decode": ".1e", "prefill": ".1e", "allowed": ".0e", "of the norm": ".1e", "may be": ".0e",
        "verdict": "",
    })  # fmt: skip
    table.notes.append(
        "Tokens in the cache + of the step: "
        + ", ".join(f"{before} + {now}" for before, now in lengths)
        + ". Results and pages that nobody has are NaN beforehand. Right: within both tolerances, pages hold what was "
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
                "case": case.name, "allowed": found.allowed.most, "may be": found.allowed.whole,
                "of the norm": max(error.whole for error in found.parts.values()),
                "verdict": f"{WRONG}: {'; '.join(found.problems)}" if found.problems else "right",
            })  # fmt: skip
    return table
