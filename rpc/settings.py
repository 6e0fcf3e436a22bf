"""Settings of a server process: its addresses, its engines, and those of the packages that it runs."""

import json
import re
from dataclasses import asdict, dataclass, field, replace

from cache_manager.settings import CacheSettings
from model.settings import ModelSettings, Sharing, SimulationSettings
from model.simulated.faults import Fault
from model.simulated.naming import is_simulated
from rpc.addresses import is_loopback
from rpc.frontend.settings import FrontendSettings
from rpc.observe.settings import ObserveSettings
from scheduler.policy_settings import check_policy_settings
from scheduler.scaling_settings import ScalingSettings
from scheduler.settings import (
    ImageLimits,
    QueueLimits,
    RecordSettings,
    RequestLimits,
    SchedulerSettings,
)

ALIASES = ("none", "vllm")


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Addresses that a server listens on, and their access."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=50051, metadata={"help": "gRPC port; 0 picks a free one."})
    metrics_port: int = field(default=9464, metadata={"help": "HTTP port of /metrics; 0 picks a free one."})
    metrics_host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "Address of /metrics, for a Prometheus elsewhere: without prompts, with names of tenants, without "
            "TLS."
        },
    )
    metrics_aliases: str = field(
        default="none",
        metadata={"help": "vllm: show metrics that mean the same as vLLM's under its names too. none: only quire_..."},
    )
    admin_port: int = field(
        default=50052, metadata={"help": "gRPC port of AdminService, on loopback only; 0 picks a free one."}
    )
    dashboard_port: int | None = field(
        default=None,
        metadata={"help": "HTTP port of the dashboard for browsers, on loopback only; 0 picks a free one. Unset: off."},
    )
    allow_insecure_bind: bool = field(
        default=False, metadata={"help": "Listen on a --host that other machines reach, without TLS or token."}
    )
    tls_cert: str | None = field(
        default=None,
        metadata={"help": "PEM file of the server's certificate and its chain; read anew when it changes."},
    )
    tls_key: str | None = field(default=None, metadata={"help": "PEM file of its key, closed to others."})
    tls_client_ca: str | None = field(
        default=None, metadata={"help": "PEM file of the authority that signs the certificates of clients (mTLS)."}
    )
    token_file: str | None = field(
        default=None,
        metadata={
            "help": "File of lines TENANT TOKEN, or TENANT TOKEN operator for the admin port, which only its owner can "
            "read; read anew when it changes. Clients send `authorization: Bearer TOKEN`."
        },
    )
    reflection: bool = field(default=False, metadata={"help": "Serve gRPC reflection."})
    max_message_bytes: int | None = field(
        default=None,
        metadata={
            "size": True,
            "help": "Largest request message; of BatchGenerate too. Unset: 8 bytes a token of context + 64 KiB, and "
            "for vision-language models four times --max-image-bytes.",
        },
    )
    max_streams: int = field(default=128, metadata={"help": "Calls at once on a connection."})

    def __post_init__(self) -> None:
        for flag, port in (
            ("--port", self.port),
            ("--metrics-port", self.metrics_port),
            ("--admin-port", self.admin_port),
            ("--dashboard-port", self.dashboard_port or 0),
        ):
            if not 0 <= port < 65536:
                raise ValueError(f"{flag} is {port}, must be in [0, 65536)")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca is for TLS: give --tls-cert and --tls-key")
        if self.lacks and not self.allow_insecure_bind:
            raise ValueError(
                f"--host {self.host} can be reached from other machines, and {self.lacks}. Serve on 127.0.0.1, or "
                "insist with --allow-insecure-bind"
            )
        if self.metrics_aliases not in ALIASES:
            raise ValueError(f"--metrics-aliases is {self.metrics_aliases!r}, must be one of {', '.join(ALIASES)}")
        if self.max_message_bytes is not None and self.max_message_bytes < 1024:
            raise ValueError(f"--max-message-bytes is {self.max_message_bytes}, must be at least 1024")
        if self.max_streams < 1:
            raise ValueError(f"--max-streams is {self.max_streams}, must be at least 1")

    @property
    def lacks(self) -> str:
        """Description of the protection that an address lacks which other machines reach; "" where it lacks none."""
        if is_loopback(self.host):
            return ""
        if self.tls_cert is None:
            return "without TLS (--tls-cert, --tls-key) any machine in between can read prompts and tokens"
        if self.token_file is None and self.tls_client_ca is None:
            return "without --token-file or --tls-client-ca any client that reaches it can use the model"
        return ""


ENGINES = ("auto", "thread", "process")
MOST_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Place and count of the engines, and times that a server waits for them, in seconds."""

    engine: str = field(
        default="auto",
        metadata={
            "help": "thread: in the server's process. process: in one of its own, behind the engine link. auto: "
            "process on a machine with an NVIDIA device, else thread."
        },
    )
    replicas: int = field(
        default=1,
        metadata={
            "help": "Engines, each with a copy of the model in a process of its own. Requests go to the one that has "
            "the least to compute for them; those of one that dies go on with another."
        },
    )
    devices: str | None = field(
        default=None,
        metadata={
            "help": "GPUs of each engine, as CUDA_VISIBLE_DEVICES names them: `0,1;2,3` gives two engines two each. "
            "Unset: the first engine has the first GPU (with --tensor-parallel N the first N), and so on; engines "
            "share a machine's only GPU."
        },
    )
    ray: bool = field(
        default=False,
        metadata={"help": "Run the engine in an actor of a Ray cluster that is started for it on this machine."},
    )
    ray_address: str | None = field(
        default=None,
        metadata={
            "help": "HOST:PORT of a running Ray cluster, which must ask for a token; this machine has to be one of its "
            "nodes. Engines are placed where there is room."
        },
    )
    ray_token_file: str | None = field(
        default=None,
        metadata={
            "help": "File with the cluster's token, which only its owner can read. Unset: as Ray has it, "
            "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."
        },
    )
    ray_cpus: float | None = field(
        default=None,
        metadata={
            "help": "Processors that Ray reserves for each process of an engine, and that many threads. Unset: 1 "
            "beside a GPU, else all of the largest node, divided among the processes of an engine that share a node."
        },
    )
    spread: bool = field(
        default=False,
        metadata={
            "help": "The processes of an engine with --tensor-parallel may be on different nodes of the Ray cluster; "
            "else they share one."
        },
    )
    start: float = field(
        default=600.0,
        metadata={"flag": "--engine-start-timeout", "help": "Seconds that an engine's process may take to be ready."},
    )
    silence: float = field(
        default=3.0,
        metadata={
            "flag": "--engine-timeout",
            "help": "Seconds without a sign of life from its process after which an engine is killed and replaced.",
        },
    )

    lease: float = field(
        default=30.0,
        metadata={
            "flag": "--engine-lease",
            "help": "Seconds without its server or a frontend after which an engine on another machine ends by itself.",
        },
    )

    metrics_targets: str | None = field(
        default=None,
        metadata={
            "help": "File for Prometheus's file_sd_configs that names each engine's own metrics, kept as engines come "
            "and go. Each engine then serves its own metrics and those of its process; this server does not."
        },
    )

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"--engine is {self.engine!r}, must be one of {', '.join(ENGINES)}")
        if self.devices is not None and (self.in_ray or self.engine == "thread"):
            raise ValueError(
                f"--devices is {self.devices!r}: Ray places its engines itself, and one in a thread (--engine) has the "
                "server's GPUs"
            )
        if self.in_ray and self.engine == "thread":
            raise ValueError("--engine thread and --ray exclude each other: an actor is a process of its own")
        if self.ray_address is not None and not re.fullmatch(r"[^:/]+:\d+|\[.+\]:\d+", self.ray_address):
            raise ValueError(f"--ray-address is {self.ray_address!r}, must be HOST:PORT")
        for name in ("ray_token_file", "ray_cpus", "spread"):
            if getattr(self, name) and self.ray_address is None:
                raise ValueError(f"--{name.replace('_', '-')} is for a cluster that is there: give its --ray-address")
        if self.ray_cpus is not None and not self.ray_cpus > 0:
            raise ValueError(f"--ray-cpus is {self.ray_cpus}, must be above 0")
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"--replicas is {self.replicas}, must be in [1, {MOST_REPLICAS}]")
        if self.replicas > 1 and self.engine == "thread":
            raise ValueError(f"--replicas is {self.replicas}: only one engine fits in a thread of the server's process")
        for flag, value in (
            ("--engine-start-timeout", self.start),
            ("--engine-timeout", self.silence),
            ("--engine-lease", self.lease),
        ):
            if not value > 0:
                raise ValueError(f"{flag} is {value}, must be above 0")

    @property
    def in_ray(self) -> bool:
        """Whether engines are actors of a Ray cluster."""
        return self.ray or self.ray_address is not None


JOIN_TOKEN = {
    "flag": "--join-token-file",
    "help": "File with the token that frontends prove to the server that they join, which only its owner can read. "
    "HOST:PORT needs one, and its traffic is not encrypted.",
}


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """Address at which frontends in other processes find a server's engines."""

    address: str | None = field(
        default=None,
        metadata={
            "flag": "--join-address",
            "help": "unix:PATH or HOST:PORT at which `quire frontend` finds this server's engines. Unset: nowhere.",
        },
    )
    token_file: str | None = field(default=None, metadata=JOIN_TOKEN)

    def __post_init__(self) -> None:
        if self.address is not None:
            check_join_address("--join-address", self.address, self.token_file)
        elif self.token_file is not None:
            raise ValueError("--join-token-file is for frontends that join: give a --join-address")


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Server whose engines a frontend uses, and times that it waits for them, in seconds."""

    join: str = field(
        default="",
        metadata={"help": "--join-address of the `quire serve` whose engines answer: unix:PATH or HOST:PORT."},
    )
    token_file: str | None = field(default=None, metadata=JOIN_TOKEN)
    start: float = field(
        default=600.0,
        metadata={"flag": "--engine-start-timeout", "help": "Seconds to wait for that server and an engine of it."},
    )
    silence: float = field(
        default=3.0,
        metadata={
            "flag": "--engine-timeout",
            "help": "Seconds without a sign of life from an engine after which its requests go on elsewhere.",
        },
    )

    def __post_init__(self) -> None:
        if not self.join:
            raise ValueError("--join is missing: the --join-address of the server whose engines answer")
        check_join_address("--join", self.join, self.token_file)
        for flag, value in (("--engine-start-timeout", self.start), ("--engine-timeout", self.silence)):
            if not value > 0:
                raise ValueError(f"{flag} is {value}, must be above 0")


def check_join_address(flag: str, address: str, token_file: str | None) -> None:
    """Raises ValueError where the address is none, or other machines reach it without a token."""
    if not re.fullmatch(r"unix:.+|[^:/]+:\d+|\[.+\]:\d+", address):
        raise ValueError(f"{flag} is {address!r}, must be unix:PATH or HOST:PORT")
    if not address.startswith("unix:") and token_file is None:
        raise ValueError(f"{flag} {address} can be reached by others: give a --join-token-file")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of one engine; JSON on its way to another process.

    Attributes:
        model: Model and its memory.
        scheduler: Batches of the steps.
        queue: Bounds of the waiting queue.
        request: Bounds of one request.
        cache: Prefix cache.
        threads: Threads of torch; None: torch's default.
        secret: Key of the block hashes, in hexadecimal; "": the engine draws one of its own.
        publishes_kv_events: Step outputs list changes of the prefix cache, by which frontends route.
        engines_here: Engines on this machine, which share its memory and processors.
        engines_on_gpu: Engines that share a GPU.
        shows_metrics: The engine serves its metrics on a port of its own.
        log_format: Format of the log lines: "text" or "json".
        record: Flight recorder.
        simulation: Simulated engines.
        step_faults: Faults of a simulated engine's steps, at seconds from its start. They come from the file of
            `simulation`, which the server alone reads.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    queue: QueueLimits = field(default_factory=QueueLimits)
    request: RequestLimits = field(default_factory=RequestLimits)
    cache: CacheSettings = field(default_factory=CacheSettings)
    threads: int | None = None
    secret: str = field(default="", repr=False)
    publishes_kv_events: bool = False
    engines_here: int = 1
    engines_on_gpu: int = 1
    shows_metrics: bool = False
    log_format: str = "text"
    record: RecordSettings = field(default_factory=RecordSettings)
    simulation: SimulationSettings = field(default_factory=SimulationSettings)
    step_faults: tuple[Fault, ...] = ()

    @property
    def sharing(self) -> Sharing:
        """Engines that share memory with this one."""
        return Sharing(self.engines_here, self.engines_on_gpu)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "EngineConfig":
        values = json.loads(text)
        return EngineConfig(
            ModelSettings(**values["model"]),
            SchedulerSettings(**values["scheduler"]),
            QueueLimits(**values["queue"]),
            RequestLimits(**values["request"]),
            CacheSettings(**values["cache"]),
            values["threads"],
            values["secret"],
            values["publishes_kv_events"],
            values["engines_here"],
            values["engines_on_gpu"],
            values["shows_metrics"],
            values["log_format"],
            RecordSettings(**values["record"]),
            SimulationSettings(**values["simulation"]),
            tuple(Fault(**fault) for fault in values["step_faults"]),
        )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of `quire serve`."""

    model: ModelSettings = field(default_factory=ModelSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    queue: QueueLimits = field(default_factory=QueueLimits)
    request: RequestLimits = field(default_factory=RequestLimits)
    cache: CacheSettings = field(default_factory=CacheSettings)
    frontend: FrontendSettings = field(default_factory=FrontendSettings)
    images: ImageLimits = field(default_factory=ImageLimits)
    sharing: SharingSettings = field(default_factory=SharingSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    simulation: SimulationSettings = field(default_factory=SimulationSettings)

    def __post_init__(self) -> None:
        if self.simulation != SimulationSettings() and not is_simulated(self.model.model):
            raise ValueError(
                "--sim-speed, --sim-output-tokens and --sim-faults are for simulated engines: --model sim:PROFILE"
            )
        most = self.scaling.replicas
        if most is not None and not self.engine.replicas <= most <= MOST_REPLICAS:
            raise ValueError(
                f"--max-replicas is {most}, must be in [{self.engine.replicas}, {MOST_REPLICAS}], from --replicas up"
            )
        check_policy_settings(self.scheduler)

    @property
    def most_replicas(self) -> int:
        return self.scaling.replicas or self.engine.replicas

    @property
    def replicas_flag(self) -> str:
        """Flag that `most_replicas` comes from."""
        return "--replicas" if self.scaling.replicas is None else "--max-replicas"

    @property
    def engine_config(self) -> EngineConfig:
        config = EngineConfig(self.model, self.scheduler, self.queue, self.request, self.cache)
        return replace(config, log_format=self.observe.log_format, record=self.record, simulation=self.simulation)


@dataclass(frozen=True, slots=True)
class JoinedSettings:
    """All settings of `quire frontend`."""

    model: ModelSettings
    join: JoinSettings
    listen: ListenSettings = field(default_factory=ListenSettings)
    request: RequestLimits = field(default_factory=RequestLimits)
    frontend: FrontendSettings = field(default_factory=FrontendSettings)
    images: ImageLimits = field(default_factory=ImageLimits)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
