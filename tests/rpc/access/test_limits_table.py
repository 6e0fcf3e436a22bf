"""docs/guides/security.md names limits that exist, with the defaults that they have."""

import re
from dataclasses import fields
from pathlib import Path

from rpc.cli.options import flag_of
from rpc.frontend.settings import FrontendSettings
from rpc.settings import ListenSettings
from scheduler.settings import ImageLimits, QueueLimits, RequestLimits, SchedulerSettings

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<default>[^|]+) \| `(?P<flag>--[a-z-]+)` \|$", re.MULTILINE)
ROOMS = (ListenSettings, SchedulerSettings, QueueLimits, FrontendSettings, RequestLimits, ImageLimits)


def test_the_table_of_limits_is_true() -> None:
    defaults = {flag_of(field): field.default for room in ROOMS for field in fields(room)}
    page = (ROOT / "docs" / "guides" / "security.md").read_text()
    table = {row["flag"]: row["default"] for row in ROW.finditer(page)}
    assert len(table) > 20
    assert table.pop("--max-message-bytes").startswith("8 a token"), "what None means is said in words"
    assert table == {flag: str(defaults[flag]) for flag in table}
