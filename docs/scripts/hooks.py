"""What MkDocs does not do by itself: pages made from the code, links to files beside the documentation, and formulas.

The pages link to `../results/...`, `../examples/...` and `../metattt/...` as they lie in the repository. Such a file
becomes a page of the site (or an asset), and the link is changed to lead to it. Formulas become MathML, which browsers
show without a script. The address of the repository is that of pyproject.toml.
"""

from __future__ import annotations

import html
import re
import sys
import tomllib
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import configuration  # noqa: E402  (beside this file, which MkDocs loads by its path)

OUTSIDE = ("results", "examples", "metattt")
LINK = re.compile(r"\]\(((?:\.\./)+(?:" + "|".join(OUTSIDE) + r")/[^)#\s]+)")

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """Takes the address of the repository from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url, config.repo_name = project["urls"]["Repository"], project["name"]
    return config


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas as MathML. A search finds the pages of the documentation before those of results and examples."""
    if page.file.src_uri.startswith(OUTSIDE):
        page.meta["search"] = {"boost": 0.1}
    return FORMULA.sub(formula, content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The plugin `offline` fetches a stand-in for workers from the network; ours is a file of the site."""
    return _own_worker(output, str(Path(page.file.dest_uri).parent))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for the page of what is not found."""
    return _own_worker(output_content, ".")


def _own_worker(output: str, folder: str) -> str:
    return output.replace("https://unpkg.com/iframe-worker/shim", relpath("assets/file_worker.js", folder))


def formula(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    made = convert(html.unescape(match[2]).strip(), display=display)
    return f'<div class="formula">{made}</div>' if display == "block" else made


def on_files(files: Files, config: Any) -> Files:
    """Adds the reference of the configuration, and every file that a page links to outside of `docs`."""
    add(files, config, "reference/configuration.md", configuration.page())
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.content_string):
            source = normpath(f"docs/{Path(page.src_uri).parent}/{link}") if page.generated_by is None else None
            source = source or normpath(f"{Path(page.src_uri).parent}/{link}")
            made = site_uri(source)
            if (ROOT / source).is_file() and files.get_file_from_path(made) is None:
                new = add(files, config, made, shown(source))
                if made.endswith(".md") and source.endswith(".md"):
                    waiting.append(new)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Changes links out of `docs` to the pages made of their files; a generated page keeps links to its neighbours."""
    own = Path(page.file.src_uri).parent

    def changed(match: re.Match[str]) -> str:
        base = own if page.file.generated_by else Path("docs") / own
        source = normpath(f"{base}/{match[1]}")
        return f"]({relpath(site_uri(source), own)}" if (ROOT / source).is_file() else match[0]

    return LINK.sub(changed, markdown)


def site_uri(source: str) -> str:
    """The place of a file of the repository in the site: text that is not Markdown becomes a page that shows it."""
    name = source.replace("README.md", "readme.md")
    return name if name.endswith((".md", ".png", ".svg")) else f"{name}.md"


def shown(source: str) -> str | bytes:
    file = ROOT / source
    if file.suffix in (".png", ".svg"):
        return file.read_bytes()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", lambda m: kept(source, m), text)
    language = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}.get(file.suffix, "text")
    return f"# {source}\n\n```{language}\n{text}\n```\n"


def kept(source: str, link: re.Match[str]) -> str:
    """A link of a page from outside, if the site has what it leads to; its text otherwise."""
    target = normpath(f"{Path(source).parent}/{link[3]}")
    if link[1] and (ROOT / target).is_file():
        return ""  # the pictures of the results are not repeated
    if target.startswith("docs/") and (ROOT / target).is_file():
        return f"[{link[2]}]({relpath(target.removeprefix('docs/'), str(Path(source).parent))})"
    return link[2]


def add(files: Files, config: Any, uri: str, content: str | bytes) -> File:
    file = File.generated(config, uri, content=content)
    files.append(file)
    return file
