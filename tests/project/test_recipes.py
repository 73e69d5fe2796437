"""Every block of docs/recipes.md runs, in order, as a reader would run them."""

import re
from pathlib import Path

import pytest

RECIPES = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


@pytest.mark.slow
def test_every_recipe_runs():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", RECIPES, flags=re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "docs/recipes.md", "exec"), names)
