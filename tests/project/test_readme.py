"""What README and docs show is run, what they name exists, and their figures are those of the committed results."""

import copy
import gzip
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from arr_coc.cli import app
from arr_coc.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
COMMANDS = typer.main.get_command(app).commands


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks_of(text, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for spoken, block in found if spoken == language]


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


# what the README says


def test_it_is_short_and_says_first_what_has_not_been_shown():
    assert len(README.split()) <= 1000  # as wc -w counts
    first, *_ = README.split("\n## ")
    assert "on real weights" in first
    assert "random weights" in first
    assert re.search(r"!\[.+\]\(docs/images/", first)
    assert "word embeddings" in README  # how the embedded model was supervised
    assert "other seeds" in README  # what our selector was trained on


@pytest.mark.slow
def test_its_commands_answer_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    variables = dict(re.findall(r"^(\w+) *\?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [(["ask", variables["IMAGE"], variables["QUESTION"]], *re.findall(r"^make ask +# (\w+)", README, re.M))]
    commands += [
        (shlex.split(command)[1:], said)
        for command, said in re.findall(r"^(\S*arr-coc ask .*?) +# (\w+)$", README, re.M)
    ]
    assert len(commands) == 2
    for arguments, said in commands:
        result = CliRunner().invoke(app, [*arguments, "--overlay", str(tmp_path / "seen.png")])
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines()[0] == said
        assert (tmp_path / "seen.png").exists()


def example_arguments():
    [line] = re.findall(r"^\S*arr-coc (eval .*)$", README, re.M)
    return shlex.split(line)


def committed_example():
    folder = ROOT / "benchmarks" / "results" / "example-cpu"
    lines = gzip.decompress((folder / "records.jsonl.gz").read_bytes()).decode().splitlines()
    return json.loads((folder / "run.json").read_text()), [json.loads(line) for line in lines]


def test_its_example_of_eval_is_the_committed_run():
    about, records = committed_example()
    assert shlex.split(about["command"])[1:] == example_arguments()
    right = {}
    for row in records:
        right.setdefault((row["selector"], row["budget"]), []).append(row["score"])
    assert {len(scores) for scores in right.values()} == {100}
    assert len({sum(scores) for scores in right.values()}) > len(right) / 2  # it shows a difference


@pytest.mark.slow
def test_its_example_of_eval_gives_these_answers_today(tmp_path):
    arguments = example_arguments()
    arguments[arguments.index("--limit") + 1] = "3"
    arguments[arguments.index("--out") + 1] = str(tmp_path / "out")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    _, records = committed_example()
    said = {(row["item"], row["selector"], row["budget"]): row["answer"] for row in records}
    today = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert len(today) == 3 * 7
    for row in today:
        key = row["item"], row["selector"], row["budget"]
        assert said[key] == row["answer"], f"{key}: run the example again, as benchmarks/readme.py says"


# figures


@pytest.fixture(name="benchmark")
def load_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    loaded = {name: importlib.import_module(name) for name in ("marks", "accuracy", "speed", "readme")}
    yield loaded
    for name in loaded:
        sys.modules.pop(name, None)


def spoil(found):
    """Every number a little larger."""
    if isinstance(found, dict):
        return {key: spoil(value) for key, value in found.items()}
    if isinstance(found, list):
        return [spoil(value) for value in found]
    return found if isinstance(found, str | bool) or found is None else found * 1.1 + 0.1


def test_tables_of_accuracy_are_those_of_the_results(benchmark):
    accuracy, fill = benchmark["accuracy"], benchmark["marks"].fill_page
    found = accuracy.read_found()
    wrong = spoil(found)
    for name, blocks in accuracy.PAGES.items():
        page = (ROOT / name).read_text()
        assert fill(page, blocks, found, "accuracy") == page, "run `python benchmarks/readme.py`"
        for block, make in blocks.items():
            assert fill(page, {block: make}, wrong, "accuracy") != page, block  # the control


def test_tables_of_the_readme_are_those_of_the_results(benchmark):
    readme, fill = benchmark["readme"], benchmark["marks"].fill_page
    found = readme.read_results()
    slower = copy.deepcopy(found.speed)
    for row in slower.rows.values():
        row["first_token"]["median_ms"] *= 2
    wrong = readme.Results(spoil(found.accuracy), slower, [{**row, "score": 0.5} for row in found.example])
    blocks = readme.PAGES["README.md"]
    assert fill(README, blocks, found, "readme") == README, "run `python benchmarks/readme.py`"
    for block, make in blocks.items():
        assert fill(README, {block: make}, wrong, "readme") != README, block  # the control


def test_what_is_made_is_marked_by_a_maker_that_knows_it(benchmark):
    entries = "entries: made by tests/models/test_entries.py"
    for page in PAGES:
        known = {
            f"{block}: made by benchmarks/{maker}.py"
            for maker in ("accuracy", "speed", "readme")
            for block in benchmark[maker].PAGES.get(name_of(page), {})
        }
        marked = set(re.findall(r"<!-- (.*?: made by .*?) -->", page.read_text())) - {entries}
        assert marked == known, name_of(page)


# code


def pages_with_python():
    """All but the README, whose example tests/models/test_answer.py runs, recipes (test_recipes.py), and a new file."""
    elsewhere = {"README.md", "CONTRIBUTING.md", "docs/recipes.md"}
    return [name_of(page) for page in PAGES if blocks_of(page.read_text(), "python") if name_of(page) not in elsewhere]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", pages_with_python())
def test_its_python_runs(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    trained = []
    monkeypatch.setattr("arr_coc.training.trainer.train", trained.append)  # thousands of steps
    code, names = blocks_of((ROOT / name).read_text(), "python"), {}
    for block in code:
        exec(compile(block, name, "exec"), names)
    printed = capsys.readouterr().out
    for said in re.findall(r"^print\(.*\)  # (.*)$", "\n".join(code), re.M):
        assert said in printed
    assert all(isinstance(config, TrainConfig) for config in trained)


@pytest.mark.slow
def test_the_selector_that_contributing_shows_chooses():
    [block] = blocks_of((ROOT / "CONTRIBUTING.md").read_text(), "python")
    code = block + (
        "import torch\n"
        "from arr_coc import create_selector\n"
        "tokens = torch.tensor([[1.0], [3.0], [2.0], [0.0]])\n"
        "query = VisualQuery(tokens=tokens, grid=(1, 2, 2), cells=(1, 2, 2), words=torch.ones(1, 1))\n"
        "[chosen] = create_selector('longest').select([query], budget=2)\n"
        "assert chosen.indices.tolist() == [1, 2]\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)  # names are registered once
    assert result.returncode == 0, result.stderr


def test_every_page_with_python_is_run():
    assert {"docs/attach.md", "docs/batches.md", "docs/gaze.md", "docs/training.md"} <= set(pages_with_python())


def command_lines(text):
    """Words of the lines of shell that call us or a script, without comments; lines that go on are joined."""
    for block in blocks_of(text, ""):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\S*(arr-coc|python) [a-z]", line):
                yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_commands_and_options_exist(page):
    text = page.read_text()
    for words in command_lines(text):
        if words[0].endswith("arr-coc"):
            options = {name for option in COMMANDS[words[1]].params for name in (*option.opts, *option.secondary_opts)}
            assert [word for word in words if word.startswith("--") and word not in options] == [], words
        elif words[1] != "-m":
            assert (ROOT / words[1]).exists(), words
    for command in re.findall(r"`arr-coc ([a-z-]+)", text):
        assert command in COMMANDS, command
    makefile = (ROOT / "Makefile").read_text()
    shown = " ".join(re.findall(r"`[^`\n]+`", without_code(text))) + "\n".join(blocks_of(text, ""))
    for target in re.findall(r"\bmake ([a-z-]+)\b", re.sub(r"#.*", "", shown)):
        assert f"\n{target}:" in makefile, target


# links and names


def slug(heading):
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(text, folder):
    """Links to files or headings that do not exist."""
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", without_code(text)):
        if target.startswith(("http:", "https:")):
            continue
        path = folder / target if target else None
        if path is not None and not path.exists():
            broken.append(target)
        elif anchor:
            linked = without_code(text if path is None else path.read_text())
            if anchor not in map(slug, re.findall(r"^#+ (.*)$", linked, flags=re.MULTILINE)):
                broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_links_lead_somewhere(page):
    assert broken_links(page.read_text(), page.parent) == []


def test_broken_links_are_noticed():
    text = "# A b\n[x](missing.md) [y](ideas.md#nowhere) [z](#a-b) [w](#b) [v](https://example.org/x)"
    assert broken_links(text, ROOT / "docs") == ["missing.md", "ideas.md#nowhere", "#b"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_it_names_exists(page):
    text = without_code(page.read_text())
    for file in re.findall(r"`([a-z_/]+\.(?:py|txt)|[a-z_]+/[a-z_/]+\.md)`", text):
        places = (ROOT, ROOT / "src" / "arr_coc", ROOT / "tests" / "prompting")
        assert any((place / file).exists() for place in places), file
    for file in re.findall(r"`((?:benchmarks|recipes|src|tests|examples)/[\w/.-]+)`", text):
        assert (ROOT / file).exists(), file


def test_the_index_has_a_line_for_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    listed = re.findall(r"^\| \[([a-z-]+\.md)\]\(\1\) \| .+ \|$", index, flags=re.MULTILINE)
    assert sorted(listed) == [page.name for page in DOCS if page.name != "README.md"]
    assert all(page.read_text().startswith("# ") for page in DOCS)


def test_no_passage_stands_on_two_pages():
    """Paragraphs of some length."""
    seen = {}
    for page in PAGES:
        for passage in re.split(r"\n\s*\n", without_code(page.read_text())):
            plain = " ".join(passage.split())
            if len(plain) > 200 and not plain.startswith(("|", "<!--")):
                assert plain not in seen, f"{name_of(page)} and {seen.get(plain)}: {plain[:60]}"
                seen[plain] = name_of(page)


def test_the_extras_are_those_that_can_be_installed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "attach.md").read_text().split("| extra |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(extras)
    for page in PAGES:
        for named in re.findall(r"pip install -e ['\"`]*\.\[(\w+)\]", page.read_text()):
            assert named in extras, named


def test_the_map_names_every_part_of_the_package():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    source = ROOT / "src" / "arr_coc"
    parts = [path.name for path in source.glob("[a-z]*.py")]
    parts += [f"{path.parent.name}/" for path in source.glob("*/__init__.py")]
    assert [part for part in parts if part not in contributing] == []
