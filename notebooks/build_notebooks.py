"""Write the notebooks from their templates, ladder.toml and the pages:  python -m notebooks.build_notebooks

A template is Markdown with Jinja calls. Jupytext turns each `python` block into a code cell, and the text between the
blocks into Markdown cells. Do not edit the notebooks: edit their templates or the pages, then run `make notebook`.
"""

import re
from pathlib import Path

import jinja2
import jupytext
import nbformat

from dev.ladder import ROOT, read_ladder, read_toml, title

HERE = Path(__file__).resolve().parent
NOTEBOOKS = "ladder", "lesson"
METADATA = {
    "accelerator": "GPU",  # this key and the next select a T4 in Colab
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def plain(markdown):
    """Return Markdown without its relative links, which do not work in Colab."""
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", markdown)


def page(rung):
    """Return parts of a rung's page: its idea, and the question and the answer of its first exercise."""
    text = (ROOT / "docs" / "pages" / "rungs" / f"{Path(rung.file).stem}.md").read_text(encoding="utf-8")
    (idea,) = re.findall(r"^<!-- \{\{ site\.head.*?\}\} -->\n\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    question, answer = re.search(r"<summary>(.*?)</summary>\n\n(.*?)\n\n</details>", text, re.DOTALL).groups()
    return {"idea": plain(idea), "question": question, "answer": plain(answer)}


def notebook(name):
    """Return a notebook as JSON. Raises nbformat.ValidationError if it is invalid."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    rungs = {rung.number: rung for rung in read_ladder()}
    repository = read_toml("pyproject.toml")["project"].get("urls", {}).get("Repository", "")
    text = jinja.get_template(f"{name}.template.md").render(rungs=rungs, page=page, title=title, repository=repository)
    made = jupytext.reads(text, fmt="md")
    made.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # the default ids are random
    nbformat.validate(made)
    return nbformat.writes(made) + "\n"


if __name__ == "__main__":
    for name in NOTEBOOKS:
        (HERE / f"{name}.ipynb").write_text(notebook(name), encoding="utf-8", newline="\n")
        print(f"notebooks/{name}.ipynb")
