"""What the README shows is run."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arr_coc.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_its_python_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    # the first is the example, which tests/models/test_answer.py runs on a tiny model
    _, embedded, code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(embedded, "README.md", "exec"), {})
    [said] = re.findall(r"print\(answer.*?# (.*)", embedded)
    assert capsys.readouterr().out.startswith(f"{said}\nrelevance ")
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([1, 64, 2048])")
    assert "('relevance',)" in printed


@pytest.mark.slow
def test_its_commands_answer_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    variables = dict(re.findall(r"^(\w+) *\?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [(["ask", variables["IMAGE"], variables["QUESTION"]], *re.findall(r"^make ask +# (\w+)", README, re.M))]
    commands += [
        (shlex.split(command)[1:], said)
        for command, said in re.findall(r"^(\S*arr-coc ask .*?) +# (\w+)$", README, re.M)
    ]
    assert len(commands) >= 2
    for arguments, said in commands:
        result = CliRunner().invoke(app, [*arguments, "--overlay", str(tmp_path / "seen.png")])
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines()[0] == said
        assert (tmp_path / "seen.png").exists()


def test_its_make_targets_and_files_exist():
    makefile = (ROOT / "Makefile").read_text()
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        targets = set(re.findall(r"\bmake ([a-z-]+)\b(?=[`\s,])", re.sub(r"make (it|a|an|the|them)\b", "", text)))
        assert targets
        for target in targets:
            assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/ideas.md", "README.md"])
def test_every_file_it_names_exists(name):
    for file in re.findall(r"`([a-z_/]+\.(?:py|md|txt))`", (ROOT / name).read_text()):
        assert any((base / file).exists() for base in (ROOT, ROOT / "src" / "arr_coc")), file


def test_the_map_names_every_part_of_the_package():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    source = ROOT / "src" / "arr_coc"
    parts = [path.name for path in source.glob("[a-z]*.py")]
    parts += [f"{path.parent.name}/" for path in source.glob("*/__init__.py")]
    assert [part for part in parts if part not in contributing] == []
