"""What is filled in on pages and forms: keys, and the functions that make their values."""

from __future__ import annotations

import random
from collections.abc import Callable

from arr_coc.data.worlds.tools.drawing import COLOURS, random_text

Maker = Callable[[random.Random], str]


def amount(rng: random.Random) -> str:
    """A sum of money."""
    return f"{rng.choice(('', '', '', '$'))}{rng.randint(0, rng.choice((9, 99, 999)))}.{rng.randint(0, 99):02d}"


def _date(rng: random.Random) -> str:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1960, 2039)
    form = rng.choice(("{d:02d}.{m:02d}.{y}", "{y}-{m:02d}-{d:02d}", "{d}/{m}/{y}"))
    return form.format(d=day, m=month, y=year)


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"


def number(rng: random.Random) -> str:
    """Up to five digits."""
    return str(rng.randint(0, 10 ** rng.randint(1, 5) - 1))


def code(rng: random.Random) -> str:
    """Capitals and digits."""
    return random_text(rng)


def word(rng: random.Random) -> str:
    """Capitals."""
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 7)))


def _phone(rng: random.Random) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def _color(rng: random.Random) -> str:
    return rng.choice(list(COLOURS))


# Keys that pages have, and the functions that make their values.
KEYS: dict[str, Maker] = {
    **dict.fromkeys(("total", "price", "tip", "amount", "tax", "cost", "sum"), amount),
    **dict.fromkeys(("date", "day", "due"), _date),
    **dict.fromkeys(("time", "hour"), _time),
    **dict.fromkeys(("number", "count", "page", "row", "room", "floor", "table", "level", "score", "age"), number),
    **dict.fromkeys(("weight", "width", "height", "length", "speed"), number),
    **dict.fromkeys(("code", "seat", "gate", "track", "plate", "part", "ticket", "flight", "type", "model"), code),
    **dict.fromkeys(("name", "city", "street", "team", "player", "teacher", "school", "owner", "company"), word),
    **dict.fromkeys(("author", "country", "guest", "member", "book"), word),
    "phone": _phone,
    "color": _color,
}


def _digits(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(least, most)))


def _letters(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(least, most)))


def _serial(rng: random.Random) -> str:
    """Digits, with the marks that serial numbers have."""
    form = rng.choice(
        ("{a}{b}", "{a}{b}", "{l}-{a}", "{a}-{b}", "{a}/{b}", "#{a}", "{l}{a}", "{l} {a}", "{a}.{b}", "{a}-{l}")
    )
    return form.format(a=_digits(rng, 2, 5), b=_digits(rng, 2, 4), l=_letters(rng, 1, 3))


def _syllables(rng: random.Random) -> str:
    """Mostly a word that can be spoken, else any letters."""
    if rng.random() < 0.4:
        return _letters(rng, 3, 8)
    spoken = "".join(rng.choice("BDFGHKLMNPRSTVW") + rng.choice("AEIOU") for _ in range(rng.randint(2, 3)))
    return spoken + rng.choice(("", "N", "R", "S", "L", "CK", "TZ"))


def _name(rng: random.Random) -> str:
    return rng.choice(("{a}", "{a}", "{a} {b}", "{a}-{b}", "O'{a}")).format(a=_syllables(rng), b=_syllables(rng))


def _address(rng: random.Random) -> str:
    form = rng.choice(("{n} {a} ST", "{a} {n}", "{n} {a}", "{n} {a} {b}", "{a} RD {n}"))
    return form.format(n=_digits(rng, 1, 3), a=_syllables(rng), b=_syllables(rng))


def _mail(rng: random.Random) -> str:
    return f"{_syllables(rng)}@{_syllables(rng)}.{rng.choice(('COM', 'ORG', 'NET', 'DE'))}"


def _money(rng: random.Random) -> str:
    paid = amount(rng).lstrip("$")
    form = rng.choice(("{}", "{}", "${}", "{} EUR", "USD {}", "{}-", "-{}", "1,{:0>6}"))
    return form.format(paid)


def _dialled(rng: random.Random) -> str:
    form = rng.choice(("+{a}-{b}-{c}", "({b}){c}", "{b}/{c}", "{b}-{c}"))
    return form.format(a=rng.randint(1, 99), b=_digits(rng, 3, 3), c=_digits(rng, 4, 6))


def _percent(rng: random.Random) -> str:
    return f"{rng.randint(0, 60)}{rng.choice(('', '', f'.{rng.randint(0, 9)}'))}%"


def _measure(rng: random.Random) -> str:
    tenths, unit = rng.choice(("", f".{rng.randint(0, 9)}")), rng.choice(("KG", "CM", "L", "PCS", "M"))
    return f"{rng.randint(1, 999)}{tenths} {unit}"


def _one_of(*words: str) -> Maker:
    return lambda rng: rng.choice((str.lower, str.upper))(rng.choice(words))


# Keys that only forms have, and the functions that make their values.
FORM_KEYS: dict[str, Maker] = {
    **{f"{what} number": _serial for what in ("order", "account", "invoice", "customer", "policy", "claim", "serial")},
    **{f"{what} number": _serial for what in ("batch", "reference", "house")},
    **{f"{what} number": _dialled for what in ("phone", "fax")},
    **{f"{what} id": _serial for what in ("tax", "patient", "employee", "member", "student")},
    **{f"{what} code": _serial for what in ("postal", "zip", "area", "product")},
    **{f"{what} date": KEYS["date"] for what in ("due", "order", "birth", "start", "end", "delivery", "visit")},
    **{f"{what} time": KEYS["time"] for what in ("start", "end", "arrival", "departure")},
    **{f"{what} name": _name for what in ("first", "last", "company", "product", "bank", "project")},
    **dict.fromkeys(("buyer", "seller", "agent", "manager", "doctor", "clerk", "department", "subject"), _name),
    **dict.fromkeys(("origin", "destination", "region", "job title"), _name),
    **dict.fromkeys(("address", "home address"), _address),
    "email": _mail,
    **dict.fromkeys(("subtotal", "net amount", "total due", "amount paid", "unit price", "balance", "deposit"), _money),
    **dict.fromkeys(("sales tax", "change"), _money),
    **dict.fromkeys(("tax rate", "discount"), _percent),
    **dict.fromkeys(("quantity", "net weight", "gross weight", "dose"), _measure),
    **dict.fromkeys(("eye color", "hair color"), _one_of(*COLOURS)),
    "payment method": _one_of("cash", "card", "check", "bank"),
    **dict.fromkeys(("paid", "married"), _one_of("yes", "no")),
}
