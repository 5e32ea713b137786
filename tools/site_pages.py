"""Hooks of `make site`: what the repository's pages need to be a site.

GitHub shows docs/*.md as they are, so the pages are written for it. For the site, pages of the top
level join them (`PAGES`), links are turned to where a file is there (other files that they name are
copied) and show a page's title instead of its file's name. A comment `<!-- api: vitkern.load -->`
becomes that object's documentation, `<!-- api: vitkern.ViT: forward, explain -->` a class with
these members. It is read from the source; `>>>` lines of docstrings become code.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "vitkern/pretrained/README.md": "pretrained.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
API = re.compile(r"^<!-- api: ([\w.]+)(?:: ([\w,\s]+))? -->$", re.M)


def source_of(uri: str) -> pathlib.Path:
    """The file of the repository that a page of the site is."""
    own = {page: ROOT / name for name, page in PAGES.items()}
    return own.get(uri, DOCS / uri)


def place(source: pathlib.Path, target: str) -> str | None:
    """Where the site has what a link of `source` names; None for a folder, which it has not."""
    found = pathlib.Path(os.path.normpath(source.parent / target))
    if found.is_dir():
        return None
    name = found.relative_to(ROOT).as_posix()
    return PAGES.get(name) or name.removeprefix("docs/")


def linked_files() -> set[str]:
    """Files that pages link to, other than pages and what docs/ has."""
    found = set()
    for source in (*DOCS.glob("*.md"), *(ROOT / name for name in PAGES)):
        for link in LINK.finditer(source.read_text(encoding="utf-8")):
            target = link[3]
            at = place(source, target) if target and "://" not in target else None
            if at and at not in PAGES.values() and not (DOCS / at).exists():
                found.add(at)
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # as GitHub's
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    for name in sorted(linked_files()):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def titles(nav: Any) -> dict[str, str]:
    """Page -> title, of mkdocs.yml's nested navigation."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, below in entry.items():
            found |= titles(below) if isinstance(below, list) else {below: title}
    return found


def documented(comment: re.Match[str]) -> str:
    """The directive of mkdocstrings that a comment stands for."""
    members = [f"        - {name}" for name in re.findall(r"\w+", comment[2] or "")]
    options = ["    options:", "      members:", *members] if members else []
    return "\n".join([f"::: {comment[1]}", *options])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source, named = source_of(page.file.src_uri), titles(config.nav)

    def moved(link: re.Match[str]) -> str:
        image, words, target, anchor = link[1], link[2], link[3], link[4] or ""
        if not target or "://" in target:
            return link[0]
        at = place(source, target)
        if at is None:
            return words
        if words.endswith(".md"):
            words = named[at]
        return f"{image}[{words}]({at}{anchor})"

    return API.sub(documented, LINK.sub(moved, markdown))
