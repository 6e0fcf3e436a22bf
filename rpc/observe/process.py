"""What a process is and takes: version, CPU time, memory, open files."""

from prometheus_client import CollectorRegistry, Info, ProcessCollector

from rpc.distribution import own_version


def show_process(registry: CollectorRegistry, model_name: str) -> None:
    """This one. Its process_... are named as everywhere, without the label model_name; quire_build_info of the same
    target has it.
    """
    ProcessCollector(registry=registry)
    build = Info("quire_build", "Version of Quire that serves this model.", ["model_name"], registry=registry)
    build.labels(model_name).info({"version": own_version()})
