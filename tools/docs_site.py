"""A hook of mkdocs: pages that lie at the root of the repository join the site.

Their links, and links to them, are made to fit; what the site does not hold (source files) loses
its link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the root's pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes links fit.

    Raises:
        SystemExit: When one leads to no file of the repository.
    """
    place = page.file.src_uri
    homes = {site: source for source, site in PAGES.items()}
    source = homes.get(place, f"docs/{place}")

    def fitted(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / wanted).exists():
            raise SystemExit(f"{source} links to {target}, and there is no {wanted}.")
        found = PAGES.get(wanted) or _in_site(wanted)
        if found is None:
            return text
        return f"{mark}[{text}]({posixpath.relpath(found, posixpath.dirname(place))}{anchor})"

    return LINK.sub(fitted, markdown)


def _in_site(wanted: str) -> str | None:
    """The place in the site of a file of the repository."""
    if not wanted.startswith("docs/"):
        return "decisions/README.md" if wanted == "docs/decisions" else None
    inside = wanted.removeprefix("docs/")
    if inside in ("decisions", "decisions/"):
        return "decisions/README.md"
    return inside if not inside.endswith(".json") else None
