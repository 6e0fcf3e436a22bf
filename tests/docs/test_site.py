"""The site that mkdocs makes of docs/: its links lead somewhere, and one that does not fails the build."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """links: of a page, with what can be followed by one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or given.get("name") or "")
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))


def build(directory: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    """Builds a copy of the docs in directory/docs to directory/site, with `changes` in mkdocs.yml."""
    if not (directory / "docs").exists():
        shutil.copytree(ROOT / "docs", directory / "docs")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | changes
    (directory / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(directory / "site")]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def dead_links(site: Path) -> list[str]:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_every_link_of_the_site_leads_somewhere(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert dead_links(tmp_path / "site") == []
    text = (tmp_path / "site/guides/adding-a-model/index.html").read_text()
    assert "<code>model/config.py</code>" in text, "without an address of the repository a file is named"


def test_links_to_files_beside_docs_lead_to_the_repository_where_it_has_an_address(tmp_path: Path) -> None:
    done = build(tmp_path, repo_url="https://example.org/quire/")
    assert done.returncode == 0, done.stderr
    links = Page(tmp_path / "site/guides/adding-a-model/index.html").links
    assert "https://example.org/quire/blob/HEAD/model/config.py" in links
    targets = {
        target
        for page in (tmp_path / "site").rglob("*.html")
        for target in re.findall(r'"https://example.org/quire/blob/HEAD/([^"#]*)', page.read_text())
    }
    assert len(targets) > 10
    assert {target for target in targets if not (ROOT / target).exists()} == set()


def test_diagrams_are_drawn_where_the_site_has_a_script_for_them(tmp_path: Path) -> None:
    script = "https://example.org/mermaid.esm.min.mjs"
    for extra, drawn in (({"mermaid": None}, False), ({"mermaid": script}, True)):
        done = build(tmp_path, extra=extra)
        assert done.returncode == 0, done.stderr
        page = (tmp_path / "site/architecture/index.html").read_text()
        assert page.count('<pre class="mermaid">') == (5 if drawn else 0)
        assert (script in page) is drawn
        assert "sequenceDiagram" in page
        assert script not in (tmp_path / "site/glossary/index.html").read_text()


@pytest.mark.parametrize(
    "link", ["[there](security.md#nothing-is-here)", "[there](#nothing)", "[there](nowhere.md)", "[there](nowhere/)"]
)
@pytest.mark.slow
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/guides/dashboard.md").open("a") as page:
        page.write(f"\nSee {link}.\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "guides/dashboard.md" in done.stderr
