"""Word problems about a changing number of things, with their worked solutions.

A story is a start, one to three events and a question; half of them carry a number that does not matter. Wording, names
and order vary, the solution follows from the problem: its sentences depend on what happened, not on how it was told.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import words
from splits import choose

LARGEST = 150  # of any number on the way

START = (
    "{N} has {a} {items} in a {box}.",
    "There are {a} {items} in {N}'s {box}.",
    "{N} keeps {a} {items} in the {box}.",
    "{N}'s {box} holds {a} {items}.",
    "At first {N} had {a} {items}, all in one {box}.",
    "{N} opened a {box} and counted {a} {items}.",
    "In the {box} {N} stores {a} {items}.",
    "{N} owns a {box} with {a} {items} inside.",
)


class Verb(NamedTuple):
    past: str
    participle: str
    solution: str  # {a} before, {n} change, {b} after


GAINS = (
    Verb("bought", "bought", "Buying {n} more makes {a} + {n} = {b}."),
    Verb("found", "found", "With the {n} that turned up there are {a} + {n} = {b}."),
    Verb("picked", "picked", "The fresh harvest of {n} brings {a} + {n} = {b}."),
    Verb("won", "won", "A prize of {n} lifts the number to {a} + {n} = {b}."),
    Verb("received", "received", "After the gift of {n} we count {a} + {n} = {b}."),
    Verb("collected", "collected", "Adding what was gathered gives {a} + {n} = {b}."),
    Verb("ordered", "ordered", "The delivery increases the amount: {a} + {n} = {b}."),
    Verb("borrowed", "borrowed", "Including the borrowed ones it becomes {a} + {n} = {b}."),
    Verb("earned", "earned", "The reward means {a} + {n} = {b} altogether."),
    Verb("rescued", "rescued", "Saving another {n} results in {a} + {n} = {b}."),
)
LOSSES = (
    Verb("gave away", "given away", "Handing over {n} leaves {a} - {n} = {b}."),
    Verb("lost", "lost", "Without the missing {n} only {a} - {n} = {b} remain."),
    Verb("sold", "sold", "The sale reduces this to {a} - {n} = {b}."),
    Verb("donated", "donated", "For charity we subtract {n} and get {a} - {n} = {b}."),
    Verb("threw away", "thrown away", "Once the trash is gone, {a} - {n} = {b} stay."),
    Verb("lent out", "lent out", "While {n} are on loan, there are {a} - {n} = {b} here."),
    Verb("mailed off", "mailed off", "Sending {n} by post takes it down to {a} - {n} = {b}."),
    Verb("traded away", "traded away", "The exchange costs {n}, so {a} - {n} = {b} are kept."),
    Verb("used up", "used up", "What was consumed has to go: {a} - {n} = {b}."),
    Verb("returned", "returned", "Bringing {n} back makes the rest {a} - {n} = {b}."),
)
CHANGE = (
    "{T} {N} {past} {n} {of}{items}.",
    "{N} {past} {n} {of}{items} {t}.",
    "{T} {he} {past} {n} of them, {N} says.",
    "{He} then {past} {n} {of}{items}.",
    "Later {N} {past} {n} {of}{items}.",
    "It was {t} that {N} {past} {n} {of}{items}.",
    "{n} {of}{items} were {participle} by {N} {t}.",
    "Before the day ended, {he} {past} {n} {of}{items}.",
)

GROUPS = (
    "{T} {N} {past} {k} {boxes} with {m} {items} each.",
    "{N} {past} {k} {boxes} of {m} {items} {t}.",
    "{He} then {past} {k} more {boxes}, and every one holds {m} {items}.",
    "Later {N} {past} {k} {boxes}, each with {m} {items} inside.",
    "{k} {boxes} with {m} {items} in each were {participle} by {N} {t}.",
)
GROUPS_SOLUTION = "The {boxes} contain {k} * {m} = {p}, for a sum of {a} + {p} = {b}."

SCALES = {2: ("doubled", "twice"), 3: ("tripled", "three times")}
SCALE = (
    "{T} the number of {items} {scaled}.",
    "{T} {N} had {times} as many {items}.",
    "The {items} {scaled} in number {t}.",
    "{He} worked hard, and {t} there were {times} as many {items}.",
    "{N}'s collection of {items} {scaled} {t}.",
)
SCALE_SOLUTION = "Growing to {times} as many yields {a} * {n} = {b}."

SHARE = (
    "{He} divides all {items} equally among {k} {friends}. How many does each {friend} get?",
    "{N} shares them evenly between {k} {friends}. How many {items} go to one {friend}?",
    "{T} {k} {friends} split the {items} equally. How many does every {friend} take?",
    "All {items} are handed to {k} {friends} in equal parts. How large is the part of one {friend}?",
    "If {k} {friends} share the {items} fairly, how many does each {friend} receive?",
)
SHARE_SOLUTION = "Divided among {k} {friends} that is {a} / {k} = {b} for everyone."

PRICE = (
    "{He} sells all {items} {t} for {n} dollars each. How many dollars does {he} get?",
    "Each of the {items} costs {n} dollars {t}. What are they worth in all?",
    "{T} somebody pays {N} {n} dollars for every one of the {items}. How much money is that?",
    "{N} wants {n} dollars apiece for the {items} {t}. How much will {he} earn by selling all?",
    "{T} all {items} are sold at {n} dollars each. What does {N} earn?",
)
PRICE_SOLUTION = "At {n} dollars apiece they bring in {a} * {n} = {b} dollars."

OTHER = (
    "{M} has {n} {more} {items} than {N} {t}.",
    "{T} {M} owns {n} {more} {items} than {N}.",
    "Compared with {N}, {M} has {n} {more} {items} {t}.",
    "{M} counted {n} {more} {items} than {N} {t}.",
    "{T} there are {n} {more} {items} in {M}'s room than {N} has.",
)
OTHER_SOLUTION = {
    "more": "{M} is ahead by {n} and so has {a} + {n} = {b}.",
    "fewer": "{M} is behind by {n} and so has {a} - {n} = {b}.",
}
OTHER_QUESTION = ("How many {items} does {M} have?", "What is the number of {M}'s {items}?", "How many are {M}'s?")
BOTH_QUESTION = (
    "How many {items} do {N} and {M} have together?",
    "What is the number of {items} of both?",
    "How many {items} is that for the two of them?",
)
BOTH_SOLUTION = "Both of them combined own {a} + {n} = {b}."

QUESTION = ("How many {items} does {N} have {end}?", "How many {items} are there {end}?",
            "What is the number of {items} {end}?", "{End}, how many {items} does {he} have?",
            "How many {items} are left with {N} {end}?", "Tell me how many {items} {N} has {end}.")  # fmt: skip
ENDS = ("now", "in the end", "at the end", "after that", "by then", "after all this", "at last", "today")

DISTRACTOR = (
    "{N} is {d} years old.",
    "The walk {t} took {d} minutes.",
    "{N}'s house has {d} windows.",
    "{T} it rained for {d} hours.",
    "{N} has lived here for {d} years.",
    "The shop is {d} miles away from {N}'s house.",
    "{T} {d} people came to visit {N}.",
    "{N} read {d} pages of a book {t}.",
)


class Story:
    """A problem as it grows: sentences, the solution's sentences, and the number so far."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        women = rng.random() < 0.5
        self.names = {"N": rng.choice(words.WOMEN if women else words.MEN), "he": "she" if women else "he"}
        self.names["M"] = rng.choice([n for n in words.WOMEN + words.MEN if n != self.names["N"]])
        self.names |= {"He": self.names["he"].capitalize(), "items": rng.choice(words.ITEMS)}
        if rng.random() < 0.5:
            self.names["items"] = f"{rng.choice(words.ADJECTIVES)} {self.names['items']}"
        self.sentences: list[str] = []
        self.solution: list[str] = []
        pattern, box = choose(rng, split, START, words.CONTAINERS)
        self.number = rng.randint(5, 60)
        self.tell(pattern, box=box, a=self.number)
        self.solve("We begin with {a} {items}.", a=self.number)

    def tell(self, pattern: str, t: str | None = None, **values: object) -> None:
        time = t or self.rng.choice(words.TIMES)
        self.sentences.append(pattern.format(t=time, T=time[0].upper() + time[1:], **self.names, **values))

    def solve(self, pattern: str, **values: object) -> None:
        self.solution.append(pattern.format(**self.names, **values))

    def change(self) -> None:
        gain = self.number < 12 or (self.number < 100 and self.rng.random() < 0.5)
        n = self.rng.randint(2, 40 if gain else min(40, self.number - 2))
        verb, pattern = choose(self.rng, self.split, GAINS if gain else LOSSES, CHANGE)
        of = self.rng.choice(("more ", "extra ")) if gain else self.rng.choice(("", "of the "))
        self.tell(pattern, n=n, of=of, past=verb.past, participle=verb.participle)
        after = self.number + n if gain else self.number - n
        self.solve(verb.solution, a=self.number, n=n, b=after)
        self.number = after

    def groups(self) -> None:
        k, m = self.rng.randint(2, 6), self.rng.randint(2, 9)
        verb, box, pattern = choose(self.rng, self.split, GAINS, list(words.PLURAL), GROUPS)
        boxes, after = words.PLURAL[box], self.number + k * m
        self.tell(pattern, k=k, m=m, boxes=boxes, past=verb.past, participle=verb.participle)
        self.solve(GROUPS_SOLUTION, boxes=boxes, k=k, m=m, p=k * m, a=self.number, b=after)
        self.number = after

    def scale(self) -> None:
        factor, pattern, time = choose(
            self.rng, self.split, [k for k in SCALES if k * self.number <= LARGEST], SCALE, words.TIMES
        )
        scaled, times = SCALES[factor]
        self.tell(pattern, t=time, scaled=scaled, times=times)
        self.solve(SCALE_SOLUTION, times=times, a=self.number, n=factor, b=self.number * factor)
        self.number *= factor

    def distract(self) -> None:
        pattern, d = choose(self.rng, self.split, DISTRACTOR, range(2, 61))
        self.tell(pattern, d=d)

    def event(self) -> None:
        kinds = [self.change] * 3
        if self.number <= LARGEST - 54:
            kinds.append(self.groups)
        if 2 * self.number <= LARGEST:
            kinds.append(self.scale)
        self.rng.choice(kinds)()

    def ask(self) -> None:
        """The last event, if it has its own question, and the question."""
        rng, split = self.rng, self.split
        kind = rng.choice(("count", "count", "share", "price", "other", "both"))
        divisors = [k for k in range(2, 10) if self.number % k == 0 and self.number // k <= 12]
        if kind == "share" and divisors:
            k = rng.choice(divisors)
            friends, pattern = choose(rng, split, words.FRIENDS, SHARE)
            self.tell(pattern, k=k, friends=friends, friend=words.SINGULAR[friends])
            self.solve(SHARE_SOLUTION, k=k, friends=friends, a=self.number, b=self.number // k)
            self.number //= k
        elif kind == "price" and self.number <= 30:
            n = rng.randint(2, min(9, LARGEST // self.number))
            pattern, time = choose(rng, split, PRICE, words.TIMES)
            self.tell(pattern, t=time, n=n)
            self.solve(PRICE_SOLUTION, a=self.number, n=n, b=self.number * n)
            self.number *= n
        elif kind in ("other", "both"):
            self.compare(both=kind == "both")
        else:
            pattern, end = choose(rng, split, QUESTION, ENDS)
            self.tell(pattern, end=end, End=str(end).capitalize())

    def compare(self, both: bool) -> None:
        more = self.rng.choice(("more", "fewer")) if self.number > 12 else "more"
        n = self.rng.randint(2, 30 if more == "more" else min(30, self.number - 2))
        pattern, time = choose(self.rng, self.split, OTHER, words.TIMES)
        self.tell(pattern, t=time, n=n, more=more)
        other = self.number + n if more == "more" else self.number - n
        self.solve(OTHER_SOLUTION[more], a=self.number, n=n, b=other)
        self.tell(self.rng.choice(BOTH_QUESTION if both else OTHER_QUESTION))
        if both:
            self.solve(BOTH_SOLUTION, a=self.number, n=other, b=self.number + other)
            other += self.number
        self.number = other


def make_problem(rng: random.Random, split: str) -> dict[str, object]:
    """One problem: prompt, answer, and the number that the answer must end with."""
    story = Story(rng, split)
    distractor = rng.randint(1, 2) if rng.random() < 0.5 else 0
    for place in range(1, rng.randint(1, 3) + 1):
        if place == distractor:
            story.distract()
        story.event()
    story.ask()
    story.solve("The answer is {b}.", b=story.number)
    return {
        "prompt": " ".join(story.sentences) + "\nSolution:",
        "answer": " " + " ".join(story.solution),
        "task": "arithmetic",
        "check": {"kind": "number", "value": story.number},
    }


def make_drill(rng: random.Random) -> tuple[str, str]:
    """A calculation as the solutions have them: its task and its result."""
    kind = rng.choice("+++---**/")
    if kind == "+":
        a, b = rng.randint(2, LARGEST), rng.randint(2, rng.choice((40, LARGEST)))
        return f" {a} + {b} =", f" {a + b}."
    if kind == "-":
        a = rng.randint(4, LARGEST)
        b = rng.randint(2, min(40, a - 2))
        return f" {a} - {b} =", f" {a - b}."
    if kind == "*":
        b = rng.randint(2, 9)
        a = rng.randint(1, LARGEST // b)
        return f" {a} * {b} =", f" {a * b}."
    b, c = rng.randint(2, 9), rng.randint(1, 12)
    return f" {b * c} / {b} =", f" {c}."
