"""The tree a stranger walks through: small folders, names that can be told apart, imports that point downwards."""

import ast
import itertools
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "arr_coc"
FOLDERS = ["src", "tests", "recipes", "benchmarks", "docs"]
MOST_FILES, MOST_AT_THE_TOP = 15, 10
# What English appends to a word, alone or in place of a last "e" or "y": evaluate, evaluating; query, queries.
ENDINGS = {"s", "es", "ed", "er", "ers", "or", "ors", "ing", "ings", "ion", "ions", "ation", "ations", "ies", "ied"}


def files_of(folder):
    """What git would track, more or less: no caches."""
    return [path for path in folder.iterdir() if path.is_file() and path.suffix != ".pyc"]


def folders_below(*names):
    for name in names:
        for folder in (ROOT / name, *(ROOT / name).rglob("*")):
            if folder.is_dir() and "__pycache__" not in folder.parts:
                yield folder


def same_word(one, other):
    """Whether two words are one with two endings: `answers` and `answered`, `evaluate` and `evaluation`."""
    if one == other:
        return True
    for length in range(3, min(len(one), len(other)) + 1):
        ends = {one[length:], other[length:]}
        if one[:length] == other[:length] and ends & ENDINGS and ends <= ENDINGS | {"", "e", "y"}:
            return True
    return False


def differ_by_an_ending(one, other):
    """Whether two stems are one word with two endings, or one is such a word and a further `_word`.

    Numbers make another name, not another ending: `qwen2_vl` and `qwen2_5_vl` are two things.
    """
    short, long = sorted((name.removeprefix("test_").split("_") for name in (one, other)), key=len)
    if len(long) == len(short) + 1 and long[-1].isalpha():
        long = long[:-1]
    return len(long) == len(short) and long[:-1] == short[:-1] and same_word(long[-1], short[-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("answers", "answered"),
        ("answers", "answers_stage"),
        ("answered", "answers_stage"),
        ("batching", "batches"),
        ("evaluating", "evaluation"),
        ("test_training", "test_trainer"),
        ("proxy", "proxy_stage"),
        ("evaluate", "evaluation"),
        ("query", "queries"),
        ("test_embedded", "test_embedded_selector"),
        ("picture_file", "picture_files"),
    ],
)
def test_names_that_differ_by_an_ending_are_caught(one, other):
    assert differ_by_an_ending(one, other)
    assert differ_by_an_ending(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *itertools.combinations(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava"], 2),
        ("test_embedded_model", "test_embedded_selector"),
        ("tome", "scope"),
        ("losses", "loader"),
        ("plan", "plane"),
        ("test_training", "test_answers_training"),
        ("texture", "text"),
        ("encoder_attention", "encoder_graph"),
        ("proxy", "prune"),
    ],
)
def test_names_of_different_things_are_not(one, other):
    assert not differ_by_an_ending(one, other)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_has_two_files_whose_names_differ_by_an_ending(name):
    alike = [
        f"{folder.relative_to(ROOT)}: {one}, {other}"
        for folder in folders_below(name)
        for one, other in itertools.combinations(sorted(path.stem for path in folder.glob("*.py")), 2)
        if differ_by_an_ending(one, other)
    ]
    assert alike == []


@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_has_more_than_fifteen_files(name):
    counts = {str(folder.relative_to(ROOT)): len(files_of(folder)) for folder in folders_below(name)}
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_the_top_level_is_the_idea():
    assert len(files_of(PACKAGE)) <= MOST_AT_THE_TOP, sorted(path.name for path in files_of(PACKAGE))


def language_checks(source):
    """Lines of `isinstance(..., LanguageSelector)`, also in a tuple or a union."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and any(isinstance(part, ast.Name) and part.id == "LanguageSelector" for part in ast.walk(node.args[1]))
    ]


def test_only_one_place_knows_the_kinds_of_selectors():
    assert language_checks(
        "isinstance(a, LanguageSelector)\nisinstance(b, X | LanguageSelector)\nisinstance(c, X)"
    ) == [1, 2]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in language_checks(path.read_text())
    ]
    assert len(found) <= 2, found


def test_every_module_says_what_it_is():
    silent = [path for path in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


@pytest.fixture(name="copy_of_the_package")
def copy_package(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "arr_coc", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder):
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("texture", "from arr_coc.knowing import InformationScorer"),
        ("attending", "import arr_coc.prompting.prune"),
        ("evaluation/metrics", "from arr_coc.training import losses"),
        ("data/__init__", "from arr_coc import prompting"),
        ("runtime/tensors", "from arr_coc.pixels import patches"),
        ("runtime/validation", "from arr_coc import realizing"),
        ("pixels/patches", "from arr_coc.runtime import validation"),
        ("selectors/papers/tome", "from arr_coc.selectors.papers import scope"),
    ],
)
def test_a_wrong_import_is_noticed(copy_of_the_package, module, line):
    path = copy_of_the_package / "arr_coc" / f"{module}.py"
    path.write_text(f"{path.read_text()}\n{line}\n")
    result = lint_imports(copy_of_the_package)
    name = module.replace("/", ".").removesuffix(".__init__")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"arr_coc.{name} -> arr_coc." in result.stdout


def test_the_imports_keep_their_contracts(copy_of_the_package):
    result = lint_imports(copy_of_the_package)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_lowest_versions_are_those_that_are_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = {"ruff", "mypy", "import-linter", "playwright", "trl"}  # not run there
    promised = {}
    for line in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        needed = Requirement(line)
        [bound] = needed.specifier
        assert bound.operator == ">=", line
        promised.setdefault(needed.name, Version(bound.version))
        assert promised[needed.name] == Version(bound.version), f"{needed.name} has two bounds"
    pins = (line.partition("==") for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if "==" in line)
    assert {name: Version(pin) for name, _, pin in pins} == {
        name: bound for name, bound in promised.items() if name not in tools
    }
