"""A hook of mkdocs: links of pages to files beside docs/.

Who reads the pages in the repository follows them there. The site has no such files: its links go to the repository's
address, `repo_url` of mkdocs.yml; where it has none, a link is the name of its file.
"""

import re
from typing import Any

BESIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page, before it looks at links."""
    repository = (config["repo_url"] or "").rstrip("/")
    return BESIDE.sub(rf"[\1]({repository}/blob/HEAD/\2\3)" if repository else r"\1", markdown)
