"""Pictures made for tests, each `[1, 3, H, W]` in [0, 1], and stand-ins for tokens and words."""

import math
import random

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont


def tensor(image):
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 255


def flat(value=0.5, height=256, width=256):
    return torch.full((1, 3, height, width), value)


def noise(seed=0, height=512, width=512):
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def with_text(picture, text, place, size=14, fill=(0, 0, 0)):
    pixels = (picture[0].permute(1, 2, 0) * 255).round().byte().numpy()
    image = Image.fromarray(pixels)
    ImageDraw.Draw(image).multiline_text(place, text, fill=fill, font=ImageFont.load_default(size))
    return tensor(image)


def splatter(seed=0, size=512, strokes=900):
    """Dripped paint all over, in the manner of Jackson Pollock."""
    chance = random.Random(seed)
    image = Image.new("RGB", (size, size), (225, 215, 195))
    pen = ImageDraw.Draw(image)
    colours = [(20, 20, 20), (250, 250, 245), (150, 60, 30), (60, 80, 110), (200, 170, 60), (120, 120, 120)]
    for _ in range(strokes):
        colour, x, y = chance.choice(colours), chance.uniform(0, size), chance.uniform(0, size)
        if chance.random() < 0.5:
            points, angle = [(x, y)], chance.uniform(0, 2 * math.pi)
            for _ in range(12):
                angle += chance.gauss(0, 0.5)
                x, y = x + 12 * math.cos(angle), y + 12 * math.sin(angle)
                points.append((x, y))
            pen.line(points, fill=colour, width=chance.randint(1, 6))
        else:
            radius = chance.uniform(1, 9)
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)
    return tensor(image)


def street(size=512):
    """A busy street: sky, houses with windows, a road, cars, a sign."""
    chance = random.Random(3)
    image = Image.new("RGB", (size, size), (150, 190, 230))
    pen = ImageDraw.Draw(image)
    left = 0
    while left < size:
        width, top = chance.randint(60, 120), chance.randint(size // 5, size // 2)
        pen.rectangle([left, top, left + width, size * 3 // 4], fill=tuple(chance.randint(60, 200) for _ in range(3)))
        for x in range(left + 10, left + width - 14, 24):
            for y in range(top + 10, size * 3 // 4 - 20, 30):
                pen.rectangle([x, y, x + 12, y + 16], fill=(40, 45, 60) if chance.random() < 0.6 else (250, 230, 150))
        left += width
    pen.rectangle([0, size * 3 // 4, size, size], fill=(70, 70, 75))
    for x in range(20, size, 120):
        pen.rectangle([x, size - 90, x + 80, size - 60], fill=tuple(chance.randint(0, 255) for _ in range(3)))
    pen.rectangle([200, 230, 300, 270], fill=(200, 20, 20))
    pen.text((212, 238), "BAKERY", fill=(255, 255, 255), font=ImageFont.load_default(20))
    return tensor(image)


def red_dot(size=512, radius=14, place=(300, 180)):
    image = Image.new("RGB", (size, size), "white")
    x, y = place
    ImageDraw.Draw(image).ellipse([x - radius, y - radius, x + radius, y + radius], fill=(220, 20, 20))
    return tensor(image)


def discs(grid, colours, cell=32, radius=9):
    """One disc in the middle of each cell of a grid, colours by (row, column), gray ground."""
    image = Image.new("RGB", (grid[1] * cell, grid[0] * cell), (128, 128, 128))
    pen = ImageDraw.Draw(image)
    for row in range(grid[0]):
        for column in range(grid[1]):
            x, y = column * cell + cell / 2, row * cell + cell / 2
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colours(row, column))
    return tensor(image)


def random_tokens(count, width=64, seed=0, batch=1):
    return torch.randn(batch, count, width, generator=torch.Generator().manual_seed(seed))
