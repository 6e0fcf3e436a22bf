"""Every panel and every rule has data: a real server with two engines under load, read by a real Prometheus."""

import json
import random
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
import pytest
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_grpc

from deploy.grafana.build import PLACE
from rpc.observe.aliases import SAME, SAME_OF_ENGINES
from tests.deploy.files import DEPLOY, read
from tests.support.call_counts import CallCounts
from tests.support.processes import tree, wait_until
from tests.support.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.support.server import RunningServer, running_alone, stream_request

pytestmark = [needs_prometheus, pytest.mark.slow]
RULES = DEPLOY / "prometheus/rules"
WINDOW = "1m"  # for $__rate_interval: longer than all that happens here
ENGINE = "rpc.engines.engine_process"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")


@dataclass
class Watched:
    server: RunningServer
    prometheus: Prometheus


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """After a load with cached prompts, evictions, a failure of an engine and requests that were moved."""
    directory = tmp_path_factory.mktemp("prometheus")
    targets = directory / "engines.json"
    flags = ["--replicas", "2", "--kv-cache-memory", "4MiB", "--metrics-targets", str(targets)]
    with running_alone(*flags, "--metrics-aliases", "vllm") as server:
        address = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
        rules = [RULES / name for name in ("recording.yml", "alerts.yml")]
        jobs = {"quire": [address]}
        with running_prometheus(directory, jobs, {"quire-engines": str(targets)}, rules) as prometheus:
            prometheus.wait_until_scraped(3)
            load(server)
            wait_until(lambda: len(json.loads(targets.read_text())) == 2, "the engine that takes the dead one's place")
            prometheus.wait_until_scraped(3)
            until_read(server, prometheus)
            yield Watched(server, prometheus)


def load(server: RunningServer) -> None:
    chance = random.Random(1)
    with grpc.insecure_channel(server.address) as channel, grpc.insecure_channel(server.admin) as admin:
        tally = CallCounts(server.stub(channel))
        prompts = [[chance.randrange(10, 1000) for _ in range(160)] for _ in range(16)]
        for prompt in [*prompts, *prompts[-4:]]:
            tally.stream(stream_request(prompt, 40, sequence_count=2)).done.result(60)
        list(server.stub(channel).StreamGenerate(stream_request("JULIET:", 5), metadata=(PARENT,), timeout=60))
        running = [tally.stream(stream_request(f"Scene {i}.", 500, seed=i)) for i in range(6)]
        wait_until(lambda: tally.counts["quire_time_to_first_token_seconds_count"] >= 26, "a token of each")
        admin_grpc.AdminServiceStub(admin).DrainReplica(admin_pb.DrainReplicaRequest(replica=0))
        admin_grpc.AdminServiceStub(admin).ResumeReplica(admin_pb.ResumeReplicaRequest(replica=0))
        victim = next(process for process in tree(server.process.pid) if ENGINE in process.cmdline())
        victim.send_signal(signal.SIGKILL)
        for one in running:
            one.done.result(60)
        tally.close()


def until_read(server: RunningServer, prometheus: Prometheus) -> None:
    """Prometheus has what the server showed at its end."""
    name = "quire_e2e_request_latency_seconds_count"
    wanted = server.metrics()[name]
    wait_until(lambda: [value for _, value in prometheus.query(name)] == [wanted], f"the last {name}", 20)


def without_data(prometheus: Prometheus, expressions: list[str], seconds: float = 10) -> dict[str, str]:
    """Returns those without data after this many seconds, with the reason: rules have to be evaluated."""
    wrong: dict[str, str] = {}

    def all_have() -> bool:
        wrong.clear()
        names = prometheus.names()
        for expression in expressions:
            unknown = {name for name in asked(expression) if name not in names}
            if unknown:
                wrong[expression] = f"there is no {', '.join(sorted(unknown))}"
            elif not (found := prometheus.query(expression)):
                wrong[expression] = "nothing"
            elif all(value != value for _, value in found):
                wrong[expression] = "NaN alone"
        return not wrong

    with suppress(AssertionError):
        wait_until(all_have, "data", seconds)
    return wrong


def asked(expression: str) -> set[str]:
    """Names of metrics."""
    return set(re.findall(r"\b(?:quire|process|vllm)_\w+|\b(?:model_name|vllm):[\w:]+|\bup\b", expression))


def with_variables(expression: str) -> str:
    return expression.replace("$model_name", "quire-.*").replace("$__rate_interval", WINDOW)


def test_every_panel_has_data(watched: Watched) -> None:
    pages = [json.loads(path.read_text()) for path in PLACE.glob("*.json")]
    panels = [target["expr"] for page in pages for panel in page["panels"] for target in panel.get("targets", ())]
    marks = [annotation["expr"] for page in pages for annotation in page["annotations"]["list"]]
    expressions = {with_variables(expression) for expression in panels + marks}
    assert len(expressions) > 80
    assert not any("$" in expression for expression in expressions)
    assert without_data(watched.prometheus, sorted(expressions)) == {}


def test_every_rule_has_data(watched: Watched) -> None:
    """An alert's data are what it compares."""
    expressions = []
    for name in ("recording.yml", "alerts.yml"):
        for group in read(RULES / name)[0]["groups"]:
            for rule in group["rules"]:
                compared = re.sub(r"^absent\((.*)\)$", r"\1", re.sub(r" (==|<|>) ", r" \1 bool ", rule["expr"]))
                expressions.append(compared if "alert" in rule else rule["expr"])
    assert len(expressions) > 30
    assert without_data(watched.prometheus, expressions) == {}
    rules = [rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert firing == set(), "nothing was wrong for long"


def test_what_has_no_data_is_found(watched: Watched) -> None:
    nan = "quire_kv_host_pages_used / quire_kv_host_pages"
    wrong = ["quire_nothing", 'quire_requests_total{outcome="nothing"}', nan]
    assert without_data(watched.prometheus, wrong, seconds=0) == {
        wrong[0]: "there is no quire_nothing",
        wrong[1]: "nothing",
        nan: "NaN alone",
    }


def test_engines_that_show_themselves_are_counted_once(watched: Watched) -> None:
    series = watched.prometheus.query("quire_kv_pages")
    assert sorted((labels["job"], labels["replica"]) for labels, _ in series) == [
        ("quire-engines", "0"),
        ("quire-engines", "1"),
    ]


def test_vllms_names_have_their_colon_in_prometheus(watched: Watched) -> None:
    """With what a Prometheus 2 asks for, prometheus_client alone would give it vllm_..."""
    prometheus, names = watched.prometheus, watched.prometheus.names()
    assert not any(name.startswith("vllm_") for name in names)
    for ours, alias in SAME.items():
        (end,) = (end for end in ("_total", "_count") if ours + end in names)
        ((_, here),) = prometheus.query(ours + end)
        ((labels, there),) = prometheus.query(f"vllm:{alias}{end}")
        assert (here, labels["engine"]) == (there, "0"), alias
    for alias in SAME_OF_ENGINES.values():
        assert names & {f"vllm:{alias}", f"vllm:{alias}_total"}, alias
    ((labels, value),) = prometheus.query("vllm:cache_config_info")
    pages = sum(pages for _, pages in prometheus.query("quire_kv_pages"))
    assert (labels["block_size"], float(labels["num_gpu_blocks"]), value) == ("16", pages, 1)


def test_a_latency_names_the_trace_of_a_request_that_had_it(watched: Watched) -> None:
    assert watched.prometheus.exemplars("quire_e2e_request_latency_seconds_bucket") == [{"trace_id": TRACE}]
