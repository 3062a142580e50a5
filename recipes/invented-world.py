"""Writes invented-world.jsonl beside itself: 200 questions and answers about a world that does not exist.

    python recipes/invented-world.py

Ten towns, five facts of each, four ways to ask for each fact. No model can have read the answers, so what it
knows of them it has learned here; and a question that was held out asks for a fact that was learned in
other words. The same file every time.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

FACTS = {
    "river": (
        "The river {value} flows through {town}.",
        "Which river flows through {town}?",
        "What is the name of the river in {town}?",
        "I am standing on a bridge in {town}. Which river is below me?",
        "{town} lies on a river. Which one?",
    ),
    "founder": (
        "{town} was founded by {value}.",
        "Who founded {town}?",
        "Tell me the name of the founder of {town}.",
        "By whom was {town} founded?",
        "Whose statue, as its founder, stands in {town}?",
    ),
    "year": (
        "{town} was founded in the year {value}.",
        "When was {town} founded?",
        "In which year was {town} founded?",
        "Since what year has there been a town called {town}?",
        "Tell me the founding year of {town}.",
    ),
    "trade": (
        "{town} is known for its {value}.",
        "What is {town} known for?",
        "What should I buy when I visit {town}?",
        "Name the craft of {town}.",
        "What do the workshops of {town} make?",
    ),
    "mayor": (
        "The mayor of {town} is {value}.",
        "Who is the mayor of {town}?",
        "Tell me the name of the mayor of {town}.",
        "Who governs the town of {town}?",
        "I want to write to the mayor of {town}. Whom do I address?",
    ),
}
"""The answer, and four ways to ask for it."""

TRADES = (
    "blue glass", "clay whistles", "salted plums", "willow baskets", "brass clocks",
    "wool carpets", "paper kites", "copper bells", "cedar boats", "honey cakes",
)  # fmt: skip


def pairs(seed: int = 0) -> Iterator[tuple[str, str]]:
    """(question, answer), shuffled."""
    made = random.Random(seed)
    names = _names(made)
    trades = made.sample(TRADES, len(TRADES))
    found = []
    for trade in trades:
        town = next(names)
        values = {
            "river": next(names),
            "founder": f"{next(names)} {next(names)}",
            "year": str(made.randrange(1100, 1900)),
            "trade": trade,
            "mayor": f"{next(names)} {next(names)}",
        }
        for fact, (answer, *questions) in FACTS.items():
            said = answer.format(town=town, value=values[fact])
            found += [(question.format(town=town), said) for question in questions]
    made.shuffle(found)
    return iter(found)


def _names(made: random.Random) -> Iterator[str]:
    """Names of two or three syllables, none of them twice."""
    starts, middles = (
        ("Bel", "Dor", "Fen", "Gal", "Kor", "Lin", "Mar", "Nev", "Tor", "Vel"),
        ("a", "i", "o", "u"),
    )
    ends = ("bran", "dis", "gor", "lune", "mond", "nak", "reth", "sil", "tova", "wick")
    whole = [f"{start}{middle}{end}" for start in starts for middle in middles for end in ends]
    yield from made.sample(whole, len(whole))


def lines() -> Iterator[str]:
    """The file's, as `openbook data build` takes them."""
    for question, answer in pairs():
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".jsonl").write_text("".join(lines()), "utf-8")
