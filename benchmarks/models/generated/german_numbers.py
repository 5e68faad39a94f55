"""German-English sentences about numbers, dates and times, written out in words: a translation task from a seed.

What a translator has to get right is real: German says units before tens and writes them as one word
(*siebenundvierzig*, forty-seven), counts half hours towards the next hour (*halb acht*, half past seven), writes
years in hundreds, puts verbs at the end and splits them (*fährt ... ab*, leaves). So words move, one word becomes
several, and no word-by-word table does it; BLEU tells models apart.

`load_parallel` reads text files instead, in the layout that is usual for IWSLT'14: `train.de`, `train.en`, `valid.*`,
`test.*`, one sentence in a line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Pair = tuple[str, str]
"""German, English."""

_UNITS_DE = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn".split()  # noqa: E501, SIM905
_UNITS_EN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: E501, SIM905
_TENS_DE = ["", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
_TENS_EN = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_MONTHS = [
    ("Januar", "January"), ("Februar", "February"), ("März", "March"), ("April", "April"), ("Mai", "May"),
    ("Juni", "June"), ("Juli", "July"), ("August", "August"), ("September", "September"), ("Oktober", "October"),
    ("November", "November"), ("Dezember", "December"),
]  # fmt: skip
_DAYS = [
    ("Montag", "Monday"), ("Dienstag", "Tuesday"), ("Mittwoch", "Wednesday"), ("Donnerstag", "Thursday"),
    ("Freitag", "Friday"), ("Samstag", "Saturday"), ("Sonntag", "Sunday"),
]  # fmt: skip
_CITIES = [
    ("Köln", "Cologne"), ("München", "Munich"), ("Wien", "Vienna"), ("Berlin", "Berlin"), ("Genf", "Geneva"),
    ("Nürnberg", "Nuremberg"), ("Prag", "Prague"), ("Mailand", "Milan"),
]  # fmt: skip
_THINGS = [
    ("Bücher", "books"), ("Äpfel", "apples"), ("Stühle", "chairs"), ("Briefe", "letters"), ("Fahrräder", "bicycles"),
    ("Fenster", "windows"), ("Flaschen", "bottles"), ("Schlüssel", "keys"), ("Bilder", "pictures"),
]  # fmt: skip
_PEOPLE = [
    ("der Lehrer", "the teacher"), ("die Ärztin", "the doctor"), ("mein Bruder", "my brother"),
    ("unsere Nachbarin", "our neighbour"), ("die Firma", "the company"), ("ihr Vater", "her father"),
]  # fmt: skip
_VERBS = [
    ("gekauft", "bought"), ("verkauft", "sold"), ("gefunden", "found"), ("verloren", "lost"), ("bestellt", "ordered"),
    ("repariert", "repaired"), ("vergessen", "forgotten"),
]  # fmt: skip


def german_number(n: int) -> str:
    """0 to 999,999, as one word.

    >>> german_number(347), german_number(21_001)
    ('dreihundertsiebenundvierzig', 'einundzwanzigtausendeins')
    """
    if n >= 1000:
        return _german_below_1000(n // 1000) + "tausend" + (german_number(n % 1000) if n % 1000 else "")
    word = _german_below_1000(n)
    return word + "s" if n % 100 == 1 else word  # `ein` stands before something, `eins` at the end


def _german_below_1000(n: int) -> str:
    if n >= 100:
        return f"{_UNITS_DE[n // 100]}hundert" + (_german_below_1000(n % 100) if n % 100 else "")
    if n < 20:
        return _UNITS_DE[n]
    return (f"{_UNITS_DE[n % 10]}und" if n % 10 else "") + _TENS_DE[n // 10]


def english_number(n: int) -> str:
    """0 to 999,999.

    >>> english_number(347), english_number(21_001)
    ('three hundred and forty-seven', 'twenty-one thousand and one')
    """
    if n >= 1000:
        rest = n % 1000
        link = " and " if 0 < rest < 100 else " "
        return f"{english_number(n // 1000)} thousand" + (link + english_number(rest) if rest else "")
    if n >= 100:
        return f"{_UNITS_EN[n // 100]} hundred" + (f" and {english_number(n % 100)}" if n % 100 else "")
    if n < 20:
        return _UNITS_EN[n]
    return _TENS_EN[n // 10] + (f"-{_UNITS_EN[n % 10]}" if n % 10 else "")


def german_ordinal(n: int) -> str:
    """1 to 31, as after *am*.

    >>> german_ordinal(3), german_ordinal(7), german_ordinal(21)
    ('dritten', 'siebten', 'einundzwanzigsten')
    """
    irregular = {1: "ersten", 3: "dritten", 7: "siebten", 8: "achten"}
    return irregular.get(n) or _german_below_1000(n) + ("ten" if n < 20 else "sten")


def english_ordinal(n: int) -> str:
    """1 to 31.

    >>> english_ordinal(3), english_ordinal(12), english_ordinal(20), english_ordinal(21)
    ('third', 'twelfth', 'twentieth', 'twenty-first')
    """
    irregular = {1: "first", 2: "second", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth", 12: "twelfth"}
    if n in irregular:
        return irregular[n]
    if n > 20 and n % 10:
        return f"{_TENS_EN[n // 10]}-{english_ordinal(n % 10)}"
    word = english_number(n)
    return word.removesuffix("y") + "ieth" if word.endswith("y") else word + "th"


def year(n: int) -> Pair:
    """1100 to 1999 in hundreds, as both languages do.

    >>> year(1984)
    ('neunzehnhundertvierundachtzig', 'nineteen eighty-four')
    """
    hundreds, rest = divmod(n, 100)
    german = f"{_german_below_1000(hundreds)}hundert" + (german_number(rest) if rest else "")
    if rest == 0:
        return german, f"{english_number(hundreds)} hundred"
    return german, f"{english_number(hundreds)} {'oh ' if rest < 10 else ''}{english_number(rest)}"


def clock(hour: int, minute: int) -> Pair:
    """A time of day, hours from 1 to 12, minutes in steps of five.

    >>> clock(7, 30), clock(7, 45), clock(12, 20)
    (('halb acht', 'half past seven'), ('Viertel vor acht', 'a quarter to eight'), ('zwanzig nach zwölf', 'twenty past twelve'))
    """  # noqa: E501
    following = hour % 12 + 1
    here, there = (german_number(h) for h in (hour, following))
    if minute == 0:
        return f"{_UNITS_DE[hour]} Uhr", f"{_UNITS_EN[hour]} o'clock"
    if minute == 30:
        return f"halb {there}", f"half past {_UNITS_EN[hour]}"
    amount = minute if minute < 30 else 60 - minute
    german = "Viertel" if amount == 15 else german_number(amount)
    english = "a quarter" if amount == 15 else english_number(amount)
    if minute < 30:
        return f"{german} nach {here}", f"{english} past {_UNITS_EN[hour]}"
    return f"{german} vor {there}", f"{english} to {_UNITS_EN[following]}"


class _Draw(NamedTuple):
    """Random parts of sentences."""

    random: random.Random

    def of(self, pairs: list[Pair]) -> Pair:
        return self.random.choice(pairs)

    def number(self) -> Pair:
        n = self.random.randrange(2, 10 ** self.random.randint(2, 6))
        return german_number(n), english_number(n)

    def date(self) -> Pair:
        day, (month_de, month_en) = self.random.randint(1, 31), self.of(_MONTHS)
        return f"am {german_ordinal(day)} {month_de}", f"on the {english_ordinal(day)} of {month_en}"

    def time(self) -> Pair:
        return clock(self.random.randint(1, 12), 5 * self.random.randrange(12))

    def year(self) -> Pair:
        return year(self.random.randint(1100, 1999))


def _train_leaves(d: _Draw) -> Pair:
    city, date, time = d.of(_CITIES), d.date(), d.time()
    if d.random.random() < 0.5:
        german = f"Der Zug nach {city[0]} fährt {date[0]} um {time[0]} ab."
    else:  # what comes first moves the subject behind the verb
        german = f"{date[0].capitalize()} fährt der Zug nach {city[0]} um {time[0]} ab."
    return german, f"The train to {city[1]} leaves {date[1]} at {time[1]}."


def _has_done(d: _Draw) -> Pair:
    who, number, thing, verb = d.of(_PEOPLE), d.number(), d.of(_THINGS), d.of(_VERBS)
    day = d.of(_DAYS)
    german = f"Am {day[0]} hat {who[0]} {number[0]} {thing[0]} {verb[0]}."
    return german, f"On {day[1]} {who[1]} has {verb[1]} {number[1]} {thing[1]}."


def _because(d: _Draw) -> Pair:
    who, first, second, thing, verb = d.of(_PEOPLE), d.number(), d.number(), d.of(_THINGS), d.of(_VERBS)
    german = f"Weil {who[0]} {first[0]} {thing[0]} {verb[0]} hat, fehlen noch {second[0]}."
    return german, f"Because {who[1]} has {verb[1]} {first[1]} {thing[1]}, {second[1]} are still missing."


def _was_born(d: _Draw) -> Pair:
    who, date, when, city = d.of(_PEOPLE), d.date(), d.year(), d.of(_CITIES)
    german = f"{who[0][0].upper()}{who[0][1:]} wurde {date[0]} {when[0]} in {city[0]} geboren."
    return german, f"{who[1][0].upper()}{who[1][1:]} was born in {city[1]} {date[1]} {when[1]}."


def _costs(d: _Draw) -> Pair:
    thing, count, price = d.of(_THINGS), d.number(), d.number()
    german = f"{count[0][0].upper()}{count[0][1:]} {thing[0]} kosten {price[0]} Euro."
    return german, f"{count[1][0].upper()}{count[1][1:]} {thing[1]} cost {price[1]} euros."


_KINDS: tuple[Callable[[_Draw], Pair], ...] = (_train_leaves, _has_done, _because, _was_born, _costs)


def generate(num_pairs: int, seed: int, without: set[Pair] | None = None) -> list[Pair]:
    """Different sentences, none of them in `without`.

    >>> pairs = generate(1000, seed=0)
    >>> len(set(pairs)), not set(pairs) & set(generate(100, seed=1, without=set(pairs)))
    (1000, True)
    """
    draw, found = _Draw(random.Random(seed)), dict.fromkeys(without or ())
    num_known = len(found)
    while len(found) < num_known + num_pairs:
        found[draw.random.choice(_KINDS)(draw)] = None
    return list(found)[num_known:]


def load_parallel(folder: Path, split: str) -> list[Pair]:
    """Sentences of `<folder>/<split>.de` and `.en`, line by line.

    Raises:
        ValueError: the two files have different numbers of lines.
    """
    german, english = ((folder / f"{split}.{language}").read_text("utf-8").splitlines() for language in ("de", "en"))
    if len(german) != len(english):
        raise ValueError(
            f"{split}.de and {split}.en must have as many lines as each other, got {len(german)} and {len(english)}. "
            "Line n of one is the translation of line n of the other."
        )
    return list(zip(german, english, strict=True))
