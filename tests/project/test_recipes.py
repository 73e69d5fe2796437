"""Every block of these pages runs, in order, as a reader would run them."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "least"), [("recipes.md", 5), ("batches.md", 3)])
def test_every_recipe_runs(page, least):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= least
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)
