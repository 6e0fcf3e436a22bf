"""docs/reference/families.md from the cases of this suite: `python -m tests.model.families.table` writes it."""

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model.families.cases import CASES, Case
from tests.model.families.checkpoints import BY_CLASS
from tests.model.families.faults import FAULTS
from tests.model.families.prompts import LENGTHS
from tests.model.families.reference import NEW, TOP
from tests.model.families.styles import CLASSIC, STYLES
from tests.model.vision import table as seeing

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "families.md"

HEAD = f"""\
# Families of models

<!-- Written by `python -m tests.model.families.table`; a test compares it with the cases. Do not edit. -->

What `architectures` in a config.json may say, and which variants of it the tests in `tests/model/families/` check. Each
is a tiny random model (64 wide, 3 or 4 layers) that transformers makes, with random norms and biases too. Any other
architecture ends the start, with the nearest of these names. For each:

- Greedy ids equal transformers' for {len(LENGTHS)} prompts of {min(LENGTHS)} to {max(LENGTHS)} tokens and {NEW} new
  ones each, in one mixed batch; the {TOP} likeliest first tokens have transformers' log-probabilities.
- Ids are the same and logits have the same bits alone, in another order, each prompt twice at once, with pages of 1, 4,
  7 and 16 tokens, with prefill in chunks, under preemption and with a shared prefix; in bfloat16 under two of these.
- Ids are the same with config.json in the Hub's classic words (`rope_theta`, `rope_scaling`, `torch_dtype`, no
  `layer_types`), and transformers' where config.json leaves out what has a default.
- Leaving any one norm or bias out would show.

| family | `architectures` | variants | other files | planted faults |
|---|---|---|---|---|
"""


def architecture(case: Case) -> str:
    return str((MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | BY_CLASS)[case.kind.model_type])


def render() -> str:
    rows = []
    for family in dict.fromkeys(case.family for case in CASES):
        cases = [case for case in CASES if case.family == family]
        names = {case.name for case in cases}
        (kind,) = {architecture(case) for case in cases}
        variants = "; ".join(case.covers for case in cases)
        files = [style.covers for style in STYLES if style.covers != CLASSIC and names & set(style.cases)]
        faults = sum(fault.case.name in names for fault in FAULTS)
        cells = (family, f"`{kind}`", variants, "; ".join(dict.fromkeys(files)) or "-", str(faults))
        rows.append("| " + " | ".join(cells) + " |\n")
    return HEAD + "".join(rows) + seeing.render()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
