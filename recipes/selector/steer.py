"""Give the package's selector the steering of a run of stage `trials`; everything else of it stays.

python recipes/selector/steer.py runs/trials --tensions detail
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from arr_coc import ARRCOCLayer
from arr_coc.balancing import TENSIONS

TARGET = Path(__file__).parents[2] / "src" / "arr_coc" / "assets" / "selector"
BEGIN, END = "<!-- steering: made by recipes/selector/steer.py -->", "<!-- /steering -->"
TEXT = """{begin}
## How much it reads

In mode `auto` the first look reads between a thirty-second and a half of a picture. How much is set by the tension
`detail`, which was learned from answers with a price on tokens ({thrift} for all tokens of a picture, where a right
answer is worth 1), in {questions:,} drawn questions that were tried {count} times each:

```
{command}
```

{left}
What it does to each kind of question is in `docs/looks.md`.
{end}
"""


def copy_steering(source: ARRCOCLayer, target: ARRCOCLayer, tensions: list[str]) -> None:
    """Copy the steering of some tensions; the others are not moved."""
    target.steering.load_state_dict(source.steering.state_dict())
    last = target.steering.correction[-1]
    still = [place for place, name in enumerate(TENSIONS) if name not in tensions]
    with torch.no_grad():
        last.weight[still], last.bias[still] = 0.0, 0.0


def describe(run: dict[str, Any], tensions: list[str]) -> str:
    """The card's section about it."""
    from arr_coc.training.trials import COUNT

    data = [f"--data {shlex.quote(name)}" for name in run["data"]]
    lines = ["arr-coc train --stage trials", *(" ".join(data[first : first + 4]) for first in range(0, len(data), 4))]
    lines.append(f"--samples {run['samples']} --steps {run['steps']} --batch {run['batch_size']} --seed {run['seed']}")
    lines.append(f"--thrift {run['thrift']} --introspect {run['introspect']} --start arr-coc --out runs/trials")
    left = [f"`{name}`" for name in TENSIONS if name not in tensions]
    names = " and ".join(left)
    return TEXT.format(
        begin=BEGIN, end=END, thrift=run["thrift"], count=COUNT,
        questions=len(set(run["data"])) * run["samples"], command=" \\\n    ".join(lines),
        left=f"The tensions {names} were learned too, but did not earn their place and are left out." if left else "",
    )  # fmt: skip


def main(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    tensions: Annotated[str, typer.Option(help="Which are steered, separated by commas.")] = ",".join(TENSIONS),
    target: Annotated[Path, typer.Option(help="Directory of the selector that gets it.")] = TARGET,
) -> None:
    names = [name.strip() for name in tensions.split(",")]
    if wrong := sorted(set(names) - set(TENSIONS)):
        raise typer.BadParameter(f"no tension is named {wrong[0]!r}; there are {', '.join(TENSIONS)}")
    layer = ARRCOCLayer.from_pretrained(target)
    copy_steering(ARRCOCLayer.from_pretrained(run), layer, names)
    card = (target / "README.md").read_text()
    section = describe(json.loads((run / "run.json").read_text()), names)
    if BEGIN in card:
        card = card[: card.index(BEGIN)] + section + card[card.index(END) + len(END) + 1 :]
    else:
        card = card.rstrip("\n") + "\n\n" + section
    aside = target.with_name(f".{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(target, aside)
    layer.save_pretrained(aside)
    (aside / "model.safetensors").chmod(0o644)
    (aside / "README.md").write_text(card)
    shutil.rmtree(target)
    aside.rename(target)
    print(f"{', '.join(names)} in {target}")


if __name__ == "__main__":
    typer.run(main)
