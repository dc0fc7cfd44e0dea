"""mkdocs hook that publishes the repository's READMEs as pages of the site.

A link to another page becomes a link inside the site, and a link to any other file a link to the repository, whose
address is in pyproject.toml. Pages that mkdocs.yml does not name come last in the navigation.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
_FRONT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # readme.md, ...: README.md would take the place of index.md
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def readmes() -> dict[str, str]:
    """Map the URI of a site page to the repository file outside of docs/ that it shows."""
    paths = [path.relative_to(REPOSITORY).as_posix() for path in sorted(REPOSITORY.glob("*/*/README.md"))]
    nested = [name for name in paths if name.startswith(("recipes/", "plugins/"))]
    return {name.lower(): name for name in _FRONT} | {name: name for name in (*nested, "benchmarks/README.md")}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the repository, and add to Reference the READMEs and all pages that mkdocs.yml does not name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = "/".join(config.repo_url.rsplit("/", 2)[1:])
    assert config.nav is not None
    named = set(_leaves(config.nav))
    reference = config.nav[-1]["Reference"]
    for title in ("recipes", "plugins"):
        reference.append({title.capitalize(): [name for name in readmes() if name.startswith(f"{title}/")]})
    docs = Path(config.docs_dir)
    pages = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))]
    if others := [page for page in pages if page not in named]:
        reference.append({"More": others})
    return config


def _leaves(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from _leaves(child)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the READMEs to the files that mkdocs renders."""
    for page, source in readmes().items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the page's links to files as links to pages of the site or to the repository."""
    uri = page.file.src_uri
    source = readmes().get(uri, f"docs/{uri}")
    page.edit_url = f"{config.repo_url}/edit/main/{source}"

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        there = _page_of(target)
        if files.get_file_from_path(there):
            return posixpath.relpath(there, posixpath.dirname(uri) or ".") + (match[2] or "")
        path = REPOSITORY / target
        if not path.exists():
            return match[0]
        return f"{config.repo_url}/{'tree' if path.is_dir() else 'blob'}/main/{target}{match[2] or ''}"

    return _LINK.sub(moved, markdown)


def _page_of(source: str) -> str:
    """Return the URI of the page that shows ``source``; a file that no page shows gives a URI outside of the site."""
    pages = {file: page for page, file in readmes().items()}
    return pages.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else f"../{source}")


def on_page_content(html: str, **_: Any) -> str:
    """Show :class:`~a.b.C`, as docstrings write it, as C."""
    return _ROLE.sub(r"<code>\1</code>", html)
