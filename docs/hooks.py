"""mkdocs hooks for these pages.

Pages use relative links to files of the repository, which work in a checkout and in a fork; on the site they point
to the repository. CONTRIBUTING.md and CHANGELOG.md from its root become pages too.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")

logger = logging.getLogger("mkdocs.hooks")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from the repository's root."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links that leave the pages to the repository."""
    folder = ROOT if page.file.src_uri in FROM_ROOT else ROOT / "docs"

    def replaced(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = (folder / path).resolve()
        if not target.exists() and files.get_file_from_path(path) is None:
            logger.warning("%s: there is no %s", page.file.src_uri, path)
        if target.is_relative_to(ROOT / "docs") and target.suffix in (".md", ".png"):
            return f"]({target.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        renamed = {source: page for page, source in FROM_ROOT.items()}.get(target.name)
        if renamed and target.parent == ROOT:
            return f"]({renamed}{anchor})"
        return f"]({config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()}{anchor})"

    return LINK.sub(replaced, markdown)
