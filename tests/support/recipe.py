"""The modules of the embedded model's recipe, which is a folder of scripts and no package."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

RECIPE = Path(__file__).parents[2] / "recipes" / "embedded"
WORDS = frozenset((RECIPE / "words.txt").read_text(encoding="utf-8").split())


def import_recipe(*names):
    """Some modules of the recipe, by their names."""
    sys.path.insert(0, str(RECIPE))
    try:
        return SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(RECIPE))
