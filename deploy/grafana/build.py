"""Writes the dashboards of this folder as JSON: `make dashboards`. Needs grafana-foundation-sdk (extra dev)."""

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.cluster import CLUSTER
from deploy.grafana.engines import ENGINES
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import GrafanaDashboard, build
from deploy.grafana.requests import REQUESTS

PAGES = (OVERVIEW, ENGINES, REQUESTS, CLUSTER)
PLACE = Path(__file__).parent / "dashboards"


def text_of(page: GrafanaDashboard) -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(build(page).build()) + "\n"


def main() -> None:
    PLACE.mkdir(exist_ok=True)
    for page in PAGES:
        (PLACE / f"{page.name}.json").write_text(text_of(page))


if __name__ == "__main__":
    main()
