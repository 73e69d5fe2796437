"""Measure a selector for the embedded model on what it never saw: where it looks, and what is answered from it.

python recipes/selector/check.py runs/selector --photos photos/validation --expressions refexp/val.jsonl.gz
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from arr_coc import ARRCOCLayer, ARRCOCQwen, VisualQuery, create_selector
from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.config import EMBEDDED, UNTRAINED
from arr_coc.data.boxes import cells_inside, clip_box
from arr_coc.data.coco import read_class_questions
from arr_coc.data.example import group_by_picture
from arr_coc.data.expressions import read_expressions
from arr_coc.data.json_lines import rows_by_picture
from arr_coc.data.sources import mix_worlds
from arr_coc.data.worlds import draw_scene, make_example, split_seed
from arr_coc.evaluation.answers import answer_examples, exact_match
from arr_coc.evaluation.metrics import coverage, overlap
from arr_coc.evaluation.run import measure_looking
from arr_coc.inference.load import load_selector
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.texture import CHANNELS
from arr_coc.training.feature_cache import INDEX, Features, features_key, weights_key, write_features
from arr_coc.training.proxy import judge_batch

SHARES = {0.25: 0.97, 0.125: 0.95, 0.06: 0.92}  # of the oracle's answers, at least
SIZES = {"scenes": (512, 512), "camouflage": (512, 512), "pages": (768, 768)}
BLIND = ("random", "grid", "centre")
FIRST = 5_000_000  # of the test seeds used here


def relevance_of(layer: ARRCOCLayer, features: Features, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Relevance `[1, N]` and cells inside `[1, N]` of one question."""
    batch = features.batch([number], layer.information.channel_logits.device)
    with torch.no_grad():
        relevance = judge_batch(layer, batch).balance.relevance.flatten(1)
    return relevance.cpu(), batch.target.cpu() > 0.5


def look(layers: dict[str, ARRCOCLayer], features: Features) -> dict[str, float]:
    """Mean overlap of each layer, and of chance."""
    found: dict[str, list[float]] = defaultdict(list)
    chance = torch.Generator().manual_seed(0)
    for number in range(len(features)):
        if not features.batch([number]).target.any():
            continue  # asks for what is not there
        for name, layer in layers.items():
            relevance, inside = relevance_of(layer, features, number)
            found[name].append(float(overlap(relevance, inside)))
        noise = torch.rand(relevance.shape, generator=chance)
        found["random"].append(float(overlap(noise, inside)))
    return {name: round(sum(values) / len(values), 4) for name, values in found.items()}


def ask(vlm: ARRCOCQwen, selectors: dict[str, Any], n: int, budgets: list[float]) -> dict[str, Any]:
    """Share of exact answers by budget and selector, and the selector's share of the oracle's."""
    samples = {
        world: [make_example(world, split_seed("test", FIRST + index), None, size) for index in range(n)]
        for world, size in SIZES.items()
    }
    together = [sample for some in samples.values() for sample in some]
    model, processor = vlm.model, vlm.processor
    found: dict[str, Any] = {"full": exact_match(together, answer_examples(model, processor, together))}
    for budget in budgets:
        row: dict[str, Any] = {}
        for name, selector in selectors.items():
            right = {
                world: exact_match(some, answer_examples(model, processor, some, selector, budget))
                for world, some in samples.items()
            }
            row[name] = {"all": round(sum(right.values()) / len(right), 4)} | {w: round(v, 4) for w, v in right.items()}
        row["share of oracle"] = round(row["selector"]["all"] / row["oracle"]["all"], 4)
        row["least share"] = SHARES[budget]
        row["share of full"] = round(row["selector"]["all"] / found["full"], 4)
        found[str(budget)] = row
        print(budget, json.dumps(row), flush=True)
    return found


def camouflage(vlm: ARRCOCQwen, n: int, budget: float) -> dict[str, float]:
    """How often the asked text gets more than twice the tokens of the bright box."""
    wins, text, box = 0, 0, 0
    for index in range(n):
        seed = split_seed("test", FIRST + index)
        sample, scene = (make("camouflage", seed, None, (512, 512)) for make in (make_example, draw_scene))
        answer = vlm.answer(sample.picture, sample.question, budget=budget)
        (_, rows, columns), cells = answer.kept[0]
        kept = torch.zeros(rows * columns, dtype=torch.bool)
        kept[torch.as_tensor(cells)] = True
        bright = [[side / 512 for side in thing.box] for thing in scene.things if thing.words == ("red",)]
        asked = cells_inside(sample.boxes, rows, columns).flatten()
        not_asked = cells_inside(bright, rows, columns).flatten() & ~asked
        on_text, on_box = int((kept & asked).sum()), int((kept & not_asked).sum())
        wins, text, box = wins + (on_text > 2 * on_box), text + on_text, box + on_box
    return {"wins": round(wins / n, 4), "tokens on text": round(text / n, 2), "tokens on box": round(box / n, 2)}


def expressions(layer: ARRCOCLayer, path: Path, features: Features) -> dict[str, Any]:
    """Coverage at a quarter beside blind rules, and whether the map follows the words."""
    rules = {name: create_selector(name) for name in BLIND}
    covered: dict[str, list[float]] = defaultdict(list)
    pairs: dict[str, list[bool]] = defaultdict(list)
    categories = _categories(path)
    numbers = {place.id: number for number, place in enumerate(features.places)}
    for group in group_by_picture(read_expressions(path)):
        known = dict.fromkeys(box for example in group for box in example.boxes)
        for example in group:
            if example.id not in numbers:
                continue  # could not be read
            number = numbers[example.id]
            relevance, inside = relevance_of(layer, features, number)
            _, rows, columns = grid = features.cells[number]
            count = max(1, round(0.25 * rows * columns))
            kept = torch.zeros_like(inside).scatter(1, relevance.topk(count).indices, True)
            covered["selector"].append(float(coverage(kept, inside)))
            batch = features.batch([number])
            query = VisualQuery(batch.tokens[0], grid, batch.words[0])
            for name, rule in rules.items():
                [chosen] = rule.select([query], count)
                kept = torch.zeros_like(inside).scatter(1, chosen.indices[None], True)
                covered[name].append(float(coverage(kept, inside)))
            flat = relevance[0]
            for other in known:
                if _iou(other, example.boxes[0]) < 0.5:
                    there = cells_inside([other], rows, columns).flatten()
                    won = bool(flat[inside[0]].mean() > flat[there].mean())
                    same = categories[example.picture_id, other] == categories[example.picture_id, example.boxes[0]]
                    pairs["same category" if same else "other category"].append(won)
    means = {name: round(sum(values) / len(values), 4) for name, values in covered.items()}
    wins = {name: (round(sum(values) / len(values), 4), len(values)) for name, values in pairs.items()}
    every = [won for values in pairs.values() for won in values]
    best = max(means[name] for name in BLIND)
    return {
        "coverage": means, "times the best blind rule": round(means["selector"] / best, 4),
        "pairs": round(sum(every) / len(every), 4), "pairs by category": wins,
    }  # fmt: skip


def _categories(path: Path) -> dict[tuple[str, Any], str]:
    found = {}
    for name, rows in rows_by_picture(path, ("image", "box", "category")).items():
        for row in rows:
            found[str(path.parent / name), clip_box(row["box"])] = row["category"]
    return found


def _iou(one: Any, other: Any) -> float:
    across = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    down = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return across * down / (areas - across * down)


def kept_coverage(vlm: ARRCOCQwen, selectors: dict[str, Any], path: Path) -> dict[str, float]:
    """Share of what each expression means that is really kept at a quarter: with exploration, text that is carried
    along, and without near-duplicates.
    """
    found = {}
    for name, selector in selectors.items():
        reader = ARRCOCQwen(vlm.model, vlm.processor, selector, budget=0.25, on_error="raise")
        shares = []
        for example in read_expressions(path):
            answer = reader.inspect(example.picture, example.question, details=False)
            shares.append(measure_looking(example, answer.kept[0], None)["coverage"])
        found[name] = round(sum(shares) / len(shares), 4)
        print("kept coverage", name, found[name], flush=True)
    return found


def discovered(layer: ARRCOCLayer, features: Features) -> dict[str, Any]:
    """What training made of the weights that have a meaning: by kind of question, and for all."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for number, place in enumerate(features.places):
        batch = features.batch([number], layer.information.channel_logits.device)
        with torch.no_grad():
            balance = judge_batch(layer, batch).balance
        found[place.kind].append(torch.cat([balance.weights[0], balance.tensions[0]]).cpu())
    means = {kind: torch.stack(rows).mean(dim=0).tolist() for kind, rows in found.items()}
    names = list(CHANNELS[layer.config.channels])
    shares = torch.softmax(layer.information.channel_logits.detach(), dim=0)
    order = shares.argsort(descending=True)[:6].tolist()
    return {
        "by kind": {
            kind: {name: round(value, 3) for name, value in zip((*SCORES, *TENSIONS), row, strict=True)}
            for kind, row in means.items()
        },
        "channels": {names[place]: round(float(shares[place]), 3) for place in order},
        "words": [round(float(share), 3) for share in torch.softmax(layer.participatory.mix_logits.detach(), dim=0)],
        "said of texture": round(layer.participatory.leaning.norm().item(), 3),
        "rows, columns, both": [round(share, 3) for share in layer.participatory.aligned.tolist()],
        "sides, up and down": [round(share, 3) for share in layer.balancer.spread.tolist()],
        "gain": [round(gain, 3) for gain in layer.balancer.gain.tolist()],
        "steepness, offset": [round(layer.allocator.steepness.item(), 3), round(layer.allocator.offset.item(), 3)],
    }


def main(
    selector: Annotated[Path, typer.Argument(help="Directory of the selector.")],
    base: Annotated[str, typer.Option(help="Directory of the model it was trained for.")] = EMBEDDED,
    n: Annotated[int, typer.Option(help="Samples of a world to ask about.")] = 200,
    photos: Annotated[Path | None, typer.Option(help="Folder of photographs in COCO format.")] = None,
    expressions_file: Annotated[Path | None, typer.Option("--expressions", help="JSON lines of expressions.")] = None,
    parts: Annotated[str, typer.Option(help="Which parts, with commas.")] = "looking,camouflage,answers",
    budgets: Annotated[str, typer.Option(help="Shares of the tokens, with commas.")] = "0.25,0.125,0.06",
    cache: Annotated[Path, typer.Option(help="Where features are kept.")] = Path("runs/features"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    vlm = ARRCOCQwen.from_pretrained(base, str(selector), dtype=torch.float32, device_map=device)
    untrained = load_selector(UNTRAINED, vlm.model).to(device)
    layers = {"selector": vlm.selector, UNTRAINED: untrained}
    found: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    found["samples"] = n
    if "looking" in parts:
        found |= looking(vlm, layers, n, photos, expressions_file, cache)
    shares = [float(share) for share in budgets.split(",")]
    if "camouflage" in parts:
        found.setdefault("camouflage", {}).update({str(share): camouflage(vlm, n, share) for share in shares})
        print("camouflage", found["camouflage"], flush=True)
    if "answers" in parts:
        others = {name: create_selector(name) for name in ("oracle", *BLIND, "downsample")}
        found.setdefault("answers", {}).update(ask(vlm, {**layers, **others}, n, shares))
    if out is not None:
        write_aside(out, json.dumps(found, indent=1) + "\n")


def looking(
    vlm: ARRCOCQwen, layers: dict[str, ARRCOCLayer], n: int, photos: Path | None, expressed: Path | None, cache: Path
) -> dict[str, Any]:
    """Where it looks: overlap beside chance and the untrained layer, expressions, and what was discovered."""
    worlds = ["scenes", "camouflage", "pages"]
    sources = {"worlds": lambda: mix_worlds(worlds, 3 * n, "test", FIRST, [(512, 512)])}
    if photos is not None:
        sources["photos"] = lambda: read_class_questions(photos, absent=0)
    if expressed is not None:
        sources["expressions"] = lambda: read_expressions(expressed)
    found: dict[str, Any] = {"overlap": {}}
    features, weights = {}, weights_key(vlm.model)
    for name, open_examples in sources.items():
        place = str({"photos": photos, "expressions": expressed}.get(name, name))
        folder = cache / features_key(weights, vlm.processor, layers[UNTRAINED], place, n, "check")
        if not (folder / INDEX).exists():
            write_features(folder, vlm.model, vlm.processor, layers[UNTRAINED], open_examples())
        features[name] = Features(folder)
        found["overlap"][name] = look(layers, features[name])
        print("overlap", name, found["overlap"][name], flush=True)
    if expressed is not None:
        found["expressions"] = expressions(layers["selector"], expressed, features["expressions"])
        print("expressions", found["expressions"], flush=True)
        others = {name: create_selector(name) for name in BLIND}
        found["expressions"]["kept coverage"] = kept_coverage(vlm, {**layers, **others}, expressed)
    found["discovered"] = discovered(layers["selector"], features["worlds"])
    print("discovered", found["discovered"], flush=True)
    return found


if __name__ == "__main__":
    typer.run(main)
