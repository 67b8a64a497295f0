"""MkDocs hooks: the notebook becomes a page, and links that leave docs/ point to the repository."""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).parent.parent
NOTEBOOK = DOCS / "tutorial.ipynb"


def on_files(files, config):
    """Add the notebook to the site, as a page."""
    files.append(File.generated(config, "tutorial.md", content=notebook_page(NOTEBOOK)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to the notebook open its page; links that leave docs/ open the repository, or become plain text."""
    markdown = markdown.replace("(tutorial.ipynb)", "(tutorial.md)")
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)", lambda link: outside(*link.groups(), config.repo_url), markdown)


def outside(text, path, repository):
    """The Markdown for a link to ``path``, which starts at the repository's root."""
    place = path.partition("#")[0]
    if not (DOCS.parent / place).exists():
        raise FileNotFoundError(f"a link in docs/ points to {path}, which is not in the repository")
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path})" if repository else text


def notebook_page(path):
    """The notebook as Markdown: its text, its code, and the output that was saved with it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def cell_parts(cell):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [fenced(source, "python"), *(shown(output) for output in cell["outputs"])]


def shown(output):
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return fenced("".join(output.get("text") or data.get("text/plain", [])).rstrip(), "text")


def fenced(text, language):
    return f"```{language}\n{text}\n```" if text else ""
