"""Marks over every graph where a server started, with its version: deploys, and unplanned restarts."""

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import AnnotationQuery, DataSourceRef


class _Annotation(AnnotationQuery):
    """Adds the fields of Grafana's Prometheus data source, which the SDK's type lacks."""

    def to_json(self) -> dict[str, object]:
        shown = {"titleFormat": "Quire {{version}}", "textFormat": "{{model_name}} started on {{instance}}"}
        return {**super().to_json(), **shown, "useValueForTime": True}


class Starts(Builder[AnnotationQuery]):
    """An annotation at the start of each server process that serves the chosen models."""

    def __init__(self, model: str, source: DataSourceRef) -> None:
        # Milliseconds since the epoch. Frontends alone have quire_replicas: engines come and go without a deploy.
        self._expr = (
            "1000 * process_start_time_seconds * on (job, instance) group_left (model_name, version)"
            f" (quire_build_info{{{model}}} and on (job, instance) quire_replicas)"
        )
        self._source = source

    def build(self) -> AnnotationQuery:
        return _Annotation(name="Starts", datasource=self._source, icon_color="blue", expr=self._expr)
