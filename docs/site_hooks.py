"""Hooks of mkdocs: links of pages to files beside docs/, and diagrams.

Readers of the repository follow such links there. The site lacks these files: its links go to the repository's address,
`repo_url` of mkdocs.yml. Without an address a link becomes the file's name.

A forge draws Mermaid diagrams by itself. The site draws them with the script that `extra.mermaid` of mkdocs.yml names,
the address of a `mermaid.esm.min.mjs`. Without an address the site shows a diagram's text.
"""

import html
import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page, before it looks at links."""
    repository = (config["repo_url"] or "").rstrip("/")
    folder = posixpath.dirname(page.file.src_uri)

    def linked(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({repository}/blob/HEAD/{target}{link[3] or ''})" if repository else link[1]

    return _with_diagrams(LINK.sub(linked, markdown), config["extra"].get("mermaid"))


def _with_diagrams(markdown: str, script: str | None) -> str:
    if not script or not DIAGRAM.search(markdown):
        return markdown
    drawn = DIAGRAM.sub(lambda diagram: f'<pre class="mermaid">\n{html.escape(diagram[1])}</pre>', markdown)
    return f'{drawn}\n<script type="module">import mermaid from "{html.escape(script)}"</script>\n'
