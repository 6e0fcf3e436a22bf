"""Panels and dashboards. Each panel has a description and a unit, and none lies over another.

Expressions are filtered by MODEL, the variable of the dashboard, and take rates over $__rate_interval.
"""

from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    Threshold,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.grafana.starts import Starts

MODEL = 'model_name=~"$model_name"'
OF_MODEL = f"and on (job, instance) quire_build_info{{{MODEL}}}"
"""Filter for metrics of the process, which have no model_name."""
UP = (
    f"up and on (job, instance) last_over_time(quire_build_info{{{MODEL}}}[1d])"
    ' or up{job=~"quire.*"} unless on (job, instance) last_over_time(quire_build_info[1d])'
)
"""`up` of targets that do not answer: with their last model_name, or any where they never had one."""
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "quire"  # tag of each dashboard
WIDTH = 24  # of Grafana's grid
TOKENS_A_SECOND = "suffix: tok/s"
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Query:
    """A query of a panel. legend: may have Grafana's {{label}}."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Queries over time, or with `now` their last values alone, in large.

    Attributes:
        unit: Grafana's name of it; after "suffix:" any text.
        width: Columns, of 24.
        top: End of the axis.
        stacked: Lines add up.
        colors: Colors of the last value: the first one below the first bound, the others from their bound on.
        details: The dashboard that shows more, by its name.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    now: bool = False
    width: int = 8
    top: float | None = None
    stacked: bool = False
    colors: tuple[str | tuple[float, str], ...] = ("text",)
    details: str = ""

    @property
    def height(self) -> int:
        return 4 if self.now else 8


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class GrafanaDashboard:
    """A dashboard."""

    name: str
    title: str
    text: str
    rows: tuple[Row, ...]


def rate(name: str, by: str = "", **labels: str) -> str:
    """Returns a counter's rate a second. by: further labels to keep. labels: regular expressions."""
    wanted = "".join(f', {label}=~"{value}"' for label, value in labels.items())
    kept = ", ".join(filter(None, ("model_name", by)))
    return f"sum by ({kept}) (rate({name}{{{MODEL}{wanted}}}[$__rate_interval]))"


def total(name: str, by: str = "") -> str:
    """Returns the sum of a gauge, by model and `by`."""
    kept = ", ".join(filter(None, ("model_name", by)))
    return f"sum by ({kept}) ({name}{{{MODEL}}})"


def of_owners(expr: str) -> str:
    """Keeps the series of servers: frontends that joined them report the same engines, and want none."""
    return f"sum by (model_name) ({expr} and quire_replicas_wanted > 0)"


def quantile(name: str, share: float) -> str:
    """Returns a histogram's quantile. An empty one's would be NaN, which `>= 0` drops."""
    return f"histogram_quantile({share}, {rate(name + '_bucket', 'le')}) >= 0"


def quantiles(name: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(name, share), f"p{share * 100:.0f} {{{{model_name}}}}") for share in QUANTILES)


def mean(name: str) -> str:
    """Returns the mean of a histogram."""
    return ratio(rate(name + "_sum"), rate(name + "_count"))


def ratio(part: str, whole: str) -> str:
    """Returns a quotient, without a value where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def some(expr: str) -> str:
    """Drops series that are 0: a legend of 23 outcomes hides the two that occur."""
    return f"{expr} > 0"


def one(expr: str, legend: str = "{{model_name}}") -> tuple[Query, ...]:
    return (Query(expr, legend),)


def build(page: GrafanaDashboard) -> builders.Dashboard:
    """Lays out the panels from left to right, in their order."""
    made = (
        builders.Dashboard(page.title)
        .uid(page.name)
        .description(page.text)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_other_dashboards())
        .annotation(Starts(MODEL, SOURCE))
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_model_variable())
    )
    number, y = 1, 0
    for row in page.rows:
        made.with_row(builders.Row(row.title).id(number).grid_pos(GridPos(x=0, y=y, w=WIDTH, h=1)))
        number, y, x, line = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, line = 0, y + line, 0
            place = GridPos(x=x, y=y, w=panel.width, h=panel.height)
            made.with_panel(_panel(panel).id(number).grid_pos(place))
            number, x, line = number + 1, x + panel.width, max(line, panel.height)
        y += line
    return made


def _model_variable() -> builders.QueryVariable:
    everything = VariableOption(text="All", value="$__all")
    return (
        builders.QueryVariable("model_name")
        .label("Model")
        .datasource(SOURCE)
        .query("label_values(quire_build_info, model_name)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )


def _other_dashboards() -> builders.DashboardLink:
    """Links all dashboards of Quire, with the shown models and time."""
    made = builders.DashboardLink("Quire").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    return made.icon("external link").as_dropdown(False).include_vars(True).keep_time(True)


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made = _stat(panel) if panel.now else _graph(panel)
    made.title(panel.title).description(panel.text).datasource(SOURCE).unit(panel.unit).min(0)
    if panel.top is not None:
        made.max(panel.top)
    for query, letter in zip(panel.queries, "ABCDEFGH", strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        made.with_target(target.instant() if panel.now else target.range())
    if panel.details:
        url = f"/d/{panel.details}?${{__url_time_range}}&${{__all_variables}}"
        made.links([builders.DashboardLink("Details").type(DashboardLinkType.LINK).url(url)])
    return made


def _stat(panel: Panel) -> stat.Panel:
    shown = common.ReduceDataOptions().calcs(["lastNotNull"])
    bounds = [color if isinstance(color, tuple) else (None, color) for color in panel.colors]
    # Grafana's own thresholds would show every value from 80 on in red.
    steps = builders.ThresholdsConfig().steps([Threshold(value, color) for value, color in bounds])
    return stat.Panel().graph_mode(common_models.BigValueGraphMode.NONE).reduce_options(shown).thresholds(steps)


def _graph(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    made = timeseries.Panel().legend(legend.display_mode(common_models.LegendDisplayMode.LIST)).fill_opacity(10)
    made.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    if panel.stacked:
        made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return made
