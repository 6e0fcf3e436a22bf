"""Settings of the scheduler and the limits that every request is checked against.

Here and in the settings of the other packages, a field's metadata is its help text on the command line. The flag is the
field's name or `flag`.
"""

from dataclasses import dataclass, field, replace

from scheduler.tenant_weights import parse_weights

DEFAULT_STEP_TOKENS = 512  # of a CPU; `rpc.engines.device_defaults` has those of GPUs
MOST_SEQUENCES = 2**16  # rows are arrays: more would only cost memory
MOST_DRAFTS = 64
MOST_ITL = 3600.0  # seconds
MOST_AGEING = 86400.0  # seconds: more is no ageing
MOST_CONSERVATIVENESS = 10.0
MOST_BACKFILL = 3600.0  # seconds
MOST_PREEMPTIONS = 1000
SCHEDULING_POLICIES = (  # of `scheduler.policies`
    "deadline",
    "dominant-share",
    "fair",
    "fair-deadline",
    "first-come",
    "priority",
)
MOST_PIXELS = 178_956_970  # Pillow refuses larger images as bombs


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of the composition of steps."""

    max_batched_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a step, decodes and prefill chunks together. Unset: 512 on a CPU; 2048, 4096 or "
            "8192 on a GPU, by its memory; and no less than --max-sequences."
        },
    )
    max_sequences: int = field(default=256, metadata={"help": "Sequences that run at once."})
    prefill_chunk: int | None = field(
        default=None, metadata={"help": "Most prompt tokens of one request in a step. Unset: the whole budget."}
    )
    steps_in_flight: int | None = field(
        default=None,
        metadata={"help": "2 plans a step while the one before it runs. Unset: 2 on a GPU, else 1."},
    )

    policy: str = field(
        default="dominant-share",
        metadata={
            "flag": "--scheduling-policy",
            "help": "Order of admission: dominant-share (tenants by their share of rows and KV), deadline (who must "
            "start soonest; who would be late is refused), fair (tenants by the tokens that they have had), "
            "fair-deadline (tenants as with fair, requests of one as with deadline), first-come or priority (by "
            "priority and age; preempts).",
        },
    )
    tenant_weights: str | None = field(
        default=None,
        metadata={
            "help": "Weights of tenants of --token-file, with --scheduling-policy fair or fair-deadline: NAME=WEIGHT, "
            "with commas between several. One of weight 2 gets twice the tokens of one that is not named, which has 1."
        },
    )
    priority_ageing: float = field(
        default=10.0,
        metadata={
            "help": "Seconds in which a request gains one level of priority, with --scheduling-policy priority. 0: "
            "never, so that one of a high value may wait for ever."
        },
    )
    draft_tokens: int = field(
        default=0,
        metadata={
            "flag": "--speculative-tokens",
            "help": "Most draft tokens of a sequence in a step. They are guessed from where its last tokens stood "
            "before, and checked in one pass. Output stays the same where logits do to the bit, as on a CPU. 0: none.",
        },
    )
    jump_forward: bool = field(
        default=True,
        metadata={
            "help": "Put tokens that a constraint leaves no choice of, such as the names in a JSON schema, behind the "
            "last one without a step of their own. Output stays the same where logits do to the bit, as on a CPU."
        },
    )
    recompute: bool = field(
        default=False,
        metadata={
            "help": "Compute every token of a sequence again at each step, and read nothing that an earlier one has "
            "left: what the KV cache is measured against."
        },
    )
    target_itl: float | None = field(
        default=None,
        metadata={
            "flag": "--target-itl",
            "help": "Seconds that a step with decodes should take at most: prefill gets what they leave of it, as "
            "learned from the steps before, beside --max-batched-tokens. Unset: prefill gets all tokens of the budget.",
        },
    )

    backfill_time: float = field(
        default=5.0,
        metadata={
            "help": "Seconds that smaller requests may pass one that lacks rows or pages, with --scheduling-policy "
            "dominant-share or first-come. Then none passes it until it is admitted. 0: none ever does."
        },
    )

    schedule_conservativeness: float = field(
        default=2.0,
        metadata={
            "help": "Steps for which running requests and a new one must be expected to find pages, by the output "
            "lengths learned so far, as a multiple of the steps from which admission pays though a preemption undoes "
            "it. More: fewer preemptions, and fewer requests at once. 0: it suffices that the prompt fits."
        },
    )

    max_preemptions: int = field(
        default=3,
        metadata={
            "help": "Times that a sequence loses its row to others, for pages or for a more urgent request, before it "
            "is passed over: then others give way, and only where all that could have reached this number the newest "
            "of them. 0: always the newest, and none for a more urgent request."
        },
    )

    @property
    def weights(self) -> dict[str, float]:
        """Weights of tenants by name, as `tenant_weights` says them."""
        return {} if self.tenant_weights is None else parse_weights(self.tenant_weights)

    @property
    def step_tokens(self) -> int:
        """Token budget of a step; that of a CPU where the setting is empty."""
        return self.max_batched_tokens or max(DEFAULT_STEP_TOKENS, self.max_sequences)

    @property
    def chunk(self) -> int:
        """Most tokens of one sequence in a step."""
        return self.prefill_chunk or self.step_tokens

    @property
    def ahead(self) -> int:
        """Most tokens of one sequence in the steps that are in flight."""
        return self.chunk * self.depth

    @property
    def depth(self) -> int:
        """Steps in flight; 1 where the setting is empty."""
        return self.steps_in_flight or 1

    def with_defaults(self, step_tokens: int, depth: int) -> "SchedulerSettings":
        """Returns settings in which those that depend on the device are not empty.

        Args:
            step_tokens: Token budget of a step, where none is set. It is raised to the number of sequences.
            depth: Steps in flight, where they are not set.
        """
        tokens = self.max_batched_tokens
        return replace(
            self,
            max_batched_tokens=max(step_tokens, self.max_sequences) if tokens is None else tokens,
            steps_in_flight=self.steps_in_flight or depth,
        )

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= MOST_SEQUENCES:
            raise ValueError(f"--max-sequences is {self.max_sequences}, must be in [1, {MOST_SEQUENCES}]")
        if self.max_batched_tokens is not None and self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"--max-batched-tokens is {self.max_batched_tokens}, must be at least --max-sequences "
                f"({self.max_sequences}), so that every running sequence can take one token a step"
            )
        if self.target_itl is not None and not 0 < self.target_itl <= MOST_ITL:
            raise ValueError(f"--target-itl is {self.target_itl}, must be in (0, {MOST_ITL:g}] seconds")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"--prefill-chunk is {self.prefill_chunk}, must be at least 1")
        if self.policy not in SCHEDULING_POLICIES:
            names = ", ".join(SCHEDULING_POLICIES)
            raise ValueError(f"--scheduling-policy is {self.policy!r}, must be one of {names}")
        if self.tenant_weights is not None:
            parse_weights(self.tenant_weights)
        if not 0 <= self.priority_ageing <= MOST_AGEING:
            raise ValueError(
                f"--priority-ageing is {self.priority_ageing}, must be in [0, {MOST_AGEING:.0f}] seconds a level"
            )
        if not 0 <= self.backfill_time <= MOST_BACKFILL:
            raise ValueError(f"--backfill-time is {self.backfill_time}, must be in [0, {MOST_BACKFILL:.0f}] seconds")
        if not 0 <= self.schedule_conservativeness <= MOST_CONSERVATIVENESS:
            raise ValueError(
                f"--schedule-conservativeness is {self.schedule_conservativeness}, must be in "
                f"[0, {MOST_CONSERVATIVENESS:.0f}]"
            )
        if not 0 <= self.max_preemptions <= MOST_PREEMPTIONS:
            raise ValueError(f"--max-preemptions is {self.max_preemptions}, must be in [0, {MOST_PREEMPTIONS}]")
        if not 0 <= self.draft_tokens <= MOST_DRAFTS:
            raise ValueError(f"--speculative-tokens is {self.draft_tokens}, must be in [0, {MOST_DRAFTS}]")
        if self.steps_in_flight not in (None, 1, 2):
            raise ValueError(f"--steps-in-flight is {self.steps_in_flight}, must be 1 or 2")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Settings of the flight recorder, `scheduler.recording`."""

    file: str | None = field(
        default=None,
        metadata={
            "flag": "--record",
            "help": "File that each engine writes what goes into its scheduler to, for `quire replay` and `quire "
            "explain`. It has sizes and times, no text and no token. An existing file is kept: FILE.1 follows. Unset: "
            "none.",
        },
    )
    steps: int = field(
        default=180_000,
        metadata={
            "flag": "--record-steps",
            "help": "Steps that a recording goes back, at least: after as many FILE begins anew, and "
            "FILE.previous keeps the others.",
        },
    )
    tokens: bool = field(
        default=False,
        metadata={
            "flag": "--record-tokens",
            "help": "Record the token ids of prompts and outputs too, as beam searches and --speculative-tokens need.",
        },
    )

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--record-steps is {self.steps}, must be at least 1")
        if self.tokens and self.file is None:
            raise ValueError("--record-tokens does nothing without --record")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the waiting queue."""

    requests: int = field(default=1024, metadata={"flag": "--max-queue", "help": "Requests that may wait."})
    pools_of_tokens: float = field(
        default=8.0,
        metadata={
            "flag": "--max-queue-pools",
            "help": "Prompt tokens that may wait, as a multiple of what the KV pool holds.",
        },
    )
    wait: float = field(
        default=30.0,
        metadata={"flag": "--max-queue-time", "help": "Seconds that a request may wait, predicted or real."},
    )
    tenant_share: float = field(
        default=0.5,
        metadata={
            "help": "Part of the queue that one tenant of --token-file may fill; rows and KV are shared equally."
        },
    )

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"--max-queue is {self.requests}, must be at least 1")
        if not self.pools_of_tokens > 0:
            raise ValueError(f"--max-queue-pools is {self.pools_of_tokens}, must be above 0")
        if not self.wait > 0:
            raise ValueError(f"--max-queue-time is {self.wait}, must be above 0 seconds")
        if not 0 < self.tenant_share <= 1:
            raise ValueError(f"--tenant-share is {self.tenant_share}, must be in (0, 1]")


NO_QUEUE_LIMITS = QueueLimits(requests=2**31, pools_of_tokens=float("inf"), wait=float("inf"), tenant_share=1.0)
"""For work that waits as long as it must: scripts and batch jobs."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request, whatever the model."""

    stop_strings: int = field(default=4, metadata={"flag": "--max-stop-strings", "help": "Stop strings."})
    stop_string_bytes: int = field(
        default=128, metadata={"flag": "--max-stop-string-bytes", "help": "Bytes of a stop string."}
    )
    stop_token_ids: int = field(
        default=64, metadata={"flag": "--max-stop-token-ids", "help": "Stop token ids beside the end tokens."}
    )
    logit_biases: int = field(
        default=1024, metadata={"flag": "--max-logit-biases", "help": "Token ids with a logit bias."}
    )
    bad_words: int = field(
        default=128, metadata={"flag": "--max-bad-words", "help": "Words that are not to be generated."}
    )
    bad_word_tokens: int = field(
        default=2048,
        metadata={
            "flag": "--max-bad-word-tokens",
            "help": "Tokens of these words in all ways of writing them.",
        },
    )
    logits_processors_args_bytes: int = field(
        default=65536,
        metadata={
            "flag": "--max-logits-processors-args-bytes",
            "help": "Bytes of the parameters of logits processors, together.",
        },
    )
    structured_output_bytes: int = field(
        default=131072,
        metadata={
            "flag": "--max-structured-output-bytes",
            "help": "Bytes of the constraint of a structured output, such as a JSON schema.",
        },
    )
    top_logprobs: int = field(
        default=20, metadata={"flag": "--max-top-logprobs", "help": "Alternatives at each position."}
    )
    sequence_count: int = field(
        default=8, metadata={"flag": "--max-sequence-count", "help": "Sequences of one prompt."}
    )
    beam_width: int = field(
        default=16, metadata={"flag": "--max-beam-width", "help": "Hypotheses that a beam search goes on from."}
    )
    batch_requests: int = field(
        default=1024, metadata={"flag": "--max-batch-requests", "help": "Entries of one BatchGenerate."}
    )
    least_priority: int = field(
        default=-100,
        metadata={"flag": "--least-priority", "help": "Lowest priority, which is the first to be served."},
    )
    request_id_bytes: int = field(
        default=128, metadata={"flag": "--max-request-id-bytes", "help": "Length of a client's request id."}
    )

    def __post_init__(self) -> None:
        for name in (
            "stop_strings",
            "stop_string_bytes",
            "stop_token_ids",
            "logit_biases",
            "bad_words",
            "bad_word_tokens",
            "logits_processors_args_bytes",
            "structured_output_bytes",
            "top_logprobs",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"--max-{name.replace('_', '-')} is {getattr(self, name)}, must be at least 0")
        if self.sequence_count < 1:
            raise ValueError(f"--max-sequence-count is {self.sequence_count}, must be at least 1")
        if self.beam_width < 1:
            raise ValueError(f"--max-beam-width is {self.beam_width}, must be at least 1")
        if self.batch_requests < 1:
            raise ValueError(f"--max-batch-requests is {self.batch_requests}, must be at least 1")
        if not -100 <= self.least_priority <= 0:
            raise ValueError(f"--least-priority is {self.least_priority}, must be in [-100, 0]")
        if self.request_id_bytes < 32:
            raise ValueError(f"--max-request-id-bytes is {self.request_id_bytes}, must be at least 32")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of the images of one request, checked before they are decoded."""

    images: int = field(default=16, metadata={"flag": "--max-images", "help": "Images of a request."})
    image_bytes: int = field(
        default=10 * 2**20,
        metadata={"flag": "--max-image-bytes", "size": True, "help": "Bytes of an image's file."},
    )
    image_pixels: int = field(
        default=40_000_000, metadata={"flag": "--max-image-pixels", "help": "Width x height of an image."}
    )
    request_pixels: int = field(
        default=80_000_000,
        metadata={"flag": "--max-request-pixels", "help": "Width x height of all images of a request together."},
    )
    image_ratio: int = field(
        default=100,
        metadata={
            "flag": "--max-image-ratio",
            "help": "Largest ratio of the sides of an image. Models that scale the shorter "
            "side to a fixed size would make a huge image of a line.",
        },
    )

    def __post_init__(self) -> None:
        if self.images < 0:
            raise ValueError(f"--max-images is {self.images}, must be at least 0")
        for name in ("image_bytes", "image_pixels", "request_pixels", "image_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"--max-{name.replace('_', '-')} is {getattr(self, name)}, must be at least 1")
        if self.image_pixels > MOST_PIXELS:
            raise ValueError(f"--max-image-pixels is {self.image_pixels}, must be at most {MOST_PIXELS}")
