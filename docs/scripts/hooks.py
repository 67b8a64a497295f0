"""MkDocs hooks: the notebook becomes a page, and links that leave docs/ point to the repository."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent.parent
NOTEBOOK = DOCS / "tutorial.ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebook to the site, as a page."""
    files.append(File.generated(config, "tutorial.md", content=notebook_page(NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to the notebook open its page; links that leave docs/ open the repository, or become plain text."""
    markdown = markdown.replace("(tutorial.ipynb)", "(tutorial.md)")
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)", lambda link: outside(link[1], link[2], config.repo_url), markdown)


def outside(text: str, path: str, repository: str | None) -> str:
    """The Markdown for a link to ``path``, which starts at the repository's root."""
    file = path.partition("#")[0]
    if not (DOCS.parent / file).exists():
        raise FileNotFoundError(f"a link in docs/ points to {path}, which is not in the repository")
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path})" if repository else text


def notebook_page(path: Path) -> str:
    """The notebook as Markdown: its text, its code, and the output that was saved with it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def cell_parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [fenced(source, "python"), *(shown(output) for output in cell["outputs"])]


def shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return fenced("".join(output.get("text") or data.get("text/plain", [])).rstrip(), "text")


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```" if text else ""
