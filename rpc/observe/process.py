"""Metrics of a process: version, CPU time, memory, open files."""

from prometheus_client import CollectorRegistry, Info, ProcessCollector

from rpc.distribution import own_version


def register_process(registry: CollectorRegistry, model_name: str) -> None:
    """Adds the metrics of this process to a registry.

    The process_... metrics have their usual names and no label model_name; quire_build_info beside them has it.
    """
    ProcessCollector(registry=registry)
    build = Info("quire_build", "Version of Quire that serves this model.", ["model_name"], registry=registry)
    build.labels(model_name).info({"version": own_version()})
