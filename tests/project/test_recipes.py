"""Every section of docs/recipes.md runs, after the first block of the page and the sections that it goes on from."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

RECIPES = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
# "## A title" begins a section, "<!-- needs trl datasets -->" names packages that a reader may not have, and
# "<!-- after Batches, A server -->" the sections whose names it uses
BEGINNING, *SECTIONS = re.split(r"^## ", RECIPES, flags=re.MULTILINE)


def run(text, names):
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "docs/recipes.md", "exec"), names)


@pytest.fixture(scope="module", name="names")
def run_beginning():
    names = {}
    run(BEGINNING, names)
    return names


def with_code():
    return {text.partition("\n")[0]: text for text in SECTIONS if "```python\n" in text}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trainers and Dynamo
@pytest.mark.parametrize("title", with_code())
def test_every_recipe_runs(title, names, tmp_path, monkeypatch):
    text = with_code()[title]
    for package in " ".join(re.findall(r"<!-- needs (.*?) -->", text)).split():
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    names = dict(names)
    earlier = [section for found in re.findall(r"<!-- after (.*?) -->", text) for section in found.split(", ")]
    for section in [*earlier, title]:
        run(with_code()[section], names)


def test_the_page_has_its_sections():
    assert {"Trainer", "TRL", "accelerate", "A pipeline", "torch.compile", "Threads", "Batches"} <= set(with_code())
