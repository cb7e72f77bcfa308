"""Hooks of the docs site (`mkdocs.yml`): pages from outside of docs/, links that lead out of it, and no word from the network.

The pages are written for a code host, where a link to a source file works. On the site such a link leads to the code host,
if `repo_url` says where that is, and else becomes the file's name. A link to a file that is not there is a warning, which ends
the build.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""File of the repository -> its page on the site."""
INSIDE = {page: file for file, page in OUTSIDE.items()}

FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]+)\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
LOADED = re.compile(
    r"<(?:(?:script|img|iframe)\b[^>]*?\bsrc|link\b(?=[^>]*\brel=.?(?:stylesheet|icon|preconnect|preload))[^>]*?\bhref)"
    r"=[\"']?(?:https?:)?//[^>]*>"
)

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for file, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn links that are right in the repository into links that are right on the site."""
    return links_of_site(markdown, page.file.src_uri, config.repo_url or "")


def on_page_content(html: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Drop the backslash before a bar in a table's code, as code hosts do."""
    return CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def on_post_page(output: str, *, page: Any, config: MkDocsConfig) -> str:
    """Warn of everything that a browser would load from another host."""
    for found in LOADED.findall(output):
        log.warning("%s loads something from elsewhere: %s", page.file.src_uri, found)
    return output


def links_of_site(markdown: str, page: str, repo_url: str) -> str:
    """A page's text with the links of the site; code blocks stay as they are."""
    here = INSIDE.get(page, f"docs/{page}")
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_links(markdown[end : fence.start()], here, page, repo_url), fence[0]]
        end = fence.end()
    return "".join([*parts, _links(markdown[end:], here, page, repo_url)])


def _links(text: str, here: str, page: str, repo_url: str) -> str:
    """`here` is the page's file in the repository."""

    def image(found: re.Match[str]) -> str:
        return f"![{found['text']}]({_target(found['target'], here, page) or found['target']})"

    def link(found: re.Match[str]) -> str:
        target = _target(found["target"], here, page)
        return _outward(found, here, repo_url) if target is None else f"[{found['text']}]({target})"

    return LINK.sub(link, IMAGE.sub(image, text))


def _target(target: str, here: str, page: str) -> str | None:
    """The link's target on the site; None for a file of the repository that has no page there."""
    path, hash_sign, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return target
    file = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if file not in OUTSIDE and not file.startswith("docs/"):
        return None
    there = OUTSIDE.get(file) or file.removeprefix("docs/")
    return posixpath.relpath(there, posixpath.dirname(page) or ".") + hash_sign + anchor


def _outward(found: re.Match[str], here: str, repo_url: str) -> str:
    """A link to a source file: to the code host, or the file's name where nobody knows a host."""
    path = found["target"].partition("#")[0]
    file = os.path.relpath(ROOT / posixpath.dirname(here) / path, ROOT)
    if file.startswith("..") or not (ROOT / file).exists():
        log.warning("%s links to %s, which the repository does not have", here, found["target"])
    if repo_url:
        return f"[{found['text']}]({repo_url.rstrip('/')}/blob/main/{file})"
    return found["text"] if file in found["text"] else f"{found['text']} (`{file}`)"
