"""What can be asked in the small world: scenes in which things happen, and questions that need no story."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from finetune.embedded import small_world as world


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its plain answer: one sentence that ends in a full stop."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Scene:
    """A few sentences in which things happen, and what can be asked about the end of it."""

    story: str
    exchanges: tuple[Exchange, ...]


def scene(random: Random) -> Scene:
    """Make up a scene: possessions that change hands, animals and things in places, or counting."""
    return random.choice((_possessions, _possessions, _places, _counting))(random)


def fact(random: Random) -> Exchange:
    """Make up a question that needs no story."""
    return random.choice(_FACTS)(random)


def _possessions(random: Random) -> Scene:
    people = random.sample(world.NAMES, random.randint(2, 3))
    things = random.sample(world.THINGS, random.randint(2, 3))
    colours = {thing: random.choice(world.COLOURS) for thing in things}
    owners = {thing: random.choice(people) for thing in things}
    sentences = []
    for thing in things:
        owner, colour = owners[thing], colours[thing]
        sentences.append(
            random.choice(
                (
                    f"{owner} has {_a(colour)} {thing}.",
                    f"{owner} has {_a(thing)}. The {thing} is {colour}.",
                    f"The {colour} {thing} belongs to {owner}.",
                )
            )
        )
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        thing = random.choice(things)
        giver = owners[thing]
        taker = random.choice([name for name in people if name != giver])
        owners[thing] = taker
        sentences.append(
            random.choice(
                (
                    f"{taker} takes the {thing}.",
                    f"{giver} gives the {thing} to {taker}.",
                    f"{giver} gives {taker} the {thing}.",
                    f"{taker} gets the {thing} from {giver}.",
                )
            )
        )
    exchanges = []
    for thing in things:
        colour = random.choice(("What colour is the", "Which colour is the", "Tell me the colour of the"))
        end = "." if colour.startswith("Tell") else "?"
        exchanges.append(Exchange(f"{colour} {thing}{end}", f"The {thing} is {colours[thing]}."))
        owner = random.choice(
            (f"Who has the {thing}?", f"Who has the {thing} now?", f"Whose is the {thing}?")
        )
        exchanges.append(Exchange(owner, f"{owners[thing]} has the {thing}."))
    return Scene(" ".join(sentences), tuple(exchanges))


def _places(random: Random) -> Scene:
    nouns = [f"the {noun}" for noun in (*world.ANIMALS, *world.THINGS)]
    places = dict(zip(random.sample([*nouns, *world.NAMES], 3), random.sample(world.PLACES, 3), strict=True))
    sentences = [f"{_capital(who)} is {place}." for who, place in places.items()]
    if random.random() < 0.4:
        who = random.choice(list(places))
        places[who] = random.choice([place for place in world.PLACES if place not in places.values()])
        sentences.append(f"Now {who} is {places[who]}.")
    exchanges = []
    for who, place in places.items():
        answer = f"{_capital(who)} is {place}."
        where = random.choice((f"Where is {who}?", f"Where is {who} now?", f"Where can I find {who}?"))
        asked = random.choice((f"Who is {place}?", f"Who or what is {place}?"))
        exchanges += [Exchange(where, answer), Exchange(asked, answer)]
    return Scene(" ".join(sentences), tuple(exchanges))


def _counting(random: Random) -> Scene:
    name, other_name = random.sample(world.NAMES, 2)
    what, other = random.sample(world.COUNTED, 2)
    number, other_number = random.randint(3, 10), random.randint(2, 10)
    sentences = [f"{name} has {number} {what}.", f"{other_name} has {other_number} {other}."]
    random.shuffle(sentences)
    change = random.randint(1, min(9, number - 1))
    happens = random.random()
    if happens < 0.35:
        number += change
        how = (f"gets {change} more {what}", f"finds {change} {what}", f"buys {change} {what}")
        sentences.append(f"{name} {random.choice(how)}.")
    elif happens < 0.7:
        number -= change
        how = (f"loses {change} {what}", f"gives away {change} {what}", f"sells {change} {what}")
        sentences.append(f"{name} {random.choice(how)}.")
    exchanges = []
    for who, noun, count in ((name, what, number), (other_name, other, other_number)):
        now = random.choice(("", " now"))
        exchanges.append(Exchange(f"How many {noun} does {who} have{now}?", f"{who} has {count} {noun}."))
    return Scene(" ".join(sentences), tuple(exchanges))


def _sum(random: Random) -> Exchange:
    whole = random.randint(0, world.LARGEST_NUMBER)
    part = random.randint(0, whole)
    rest = whole - part
    plus = random.random() < 0.5
    sum_, result = (f"{part} plus {rest}", whole) if plus else (f"{whole} minus {part}", rest)
    asked = random.choice(
        (f"What is {sum_}?", f"How much is {sum_}?", f"{sum_}?", f"Please work out {sum_}.")
    )
    return Exchange(asked, f"{sum_} is {result}.")


def _next_number(random: Random) -> Exchange:
    number = random.randint(1, world.LARGEST_NUMBER - 1)
    if random.random() < 0.5:
        return Exchange(f"Which number comes after {number}?", f"{number + 1} comes after {number}.")
    return Exchange(f"Which number comes before {number + 1}?", f"{number} comes before {number + 1}.")


def _opposite(random: Random) -> Exchange:
    one, other = random.sample(random.choice(world.OPPOSITES), 2)
    asked = random.choice(
        (f"What is the opposite of {one}?", f"Tell me the opposite of {one}.", f"What is not {one}?")
    )
    return Exchange(asked, f"The opposite of {one} is {other}.")


def _animal(random: Random) -> Exchange:
    animal = random.choice(tuple(world.ANIMALS))
    sound, home, legs = world.ANIMALS[animal]
    says, lives = f"{_capital(_a(animal))} says {sound}.", f"{_capital(_a(animal))} lives {home}."
    return random.choice(
        (
            Exchange(f"What does {_a(animal)} say?", says),
            Exchange(f"Which sound does {_a(animal)} make?", says),
            Exchange(f"Which animal says {sound}?", says),
            Exchange(f"Where does {_a(animal)} live?", lives),
            Exchange(f"Where is the home of {_a(animal)}?", lives),
            Exchange(f"How many legs does {_a(animal)} have?", f"{_capital(_a(animal))} has {legs} legs."),
        )
    )


def _ability(random: Random) -> Exchange:
    ability, able = random.choice(tuple(world.ABILITIES.items()))
    animals = sorted({animal for group in world.ABILITIES.values() for animal in group})
    who = random.choice(able if able and random.random() < 0.5 else animals)
    answer = f"Yes, {_a(who)} can {ability}." if who in able else f"No, {_a(who)} can not {ability}."
    return Exchange(f"Can {_a(who)} {ability}?", answer)


def _size(random: Random) -> Exchange:
    small, big = (world.BY_SIZE[place] for place in sorted(random.sample(range(len(world.BY_SIZE)), 2)))
    one, other = random.sample((small, big), 2)
    asked, answer = random.choice((("bigger", big), ("smaller", small)))
    return Exchange(f"Which is {asked}, {_a(one)} or {_a(other)}?", f"{_capital(_a(answer))} is {asked}.")


def _kind(random: Random) -> Exchange:
    kind = random.choice(tuple(world.KINDS))
    asked = kind if random.random() < 0.5 else random.choice(tuple(world.KINDS))
    member = random.choice(world.KINDS[kind])
    subject = member if kind == "colour" else _a(member)
    if random.random() < 0.5:
        return Exchange(f"What is {subject}?", f"{_capital(subject)} is {_a(kind)}.")
    answer = f"Yes, {subject} is {_a(asked)}." if asked == kind else f"No, {subject} is not {_a(asked)}."
    return Exchange(f"Is {subject} {_a(asked)}?", answer)


def _seen_colour(random: Random) -> Exchange:
    what, colour = random.choice(tuple(world.SEEN_COLOURS.items()))
    asked = random.choice((f"What colour is {what}?", f"Tell me the colour of {what}."))
    return Exchange(asked, f"{_capital(what)} is {colour}.")


def _day(random: Random) -> Exchange:
    index = random.randrange(len(world.DAYS))
    day, following = world.DAYS[index], world.DAYS[(index + 1) % len(world.DAYS)]
    if random.random() < 0.5:
        return Exchange(f"Which day comes after {day}?", f"{following} comes after {day}.")
    return Exchange(f"Which day comes before {following}?", f"{day} comes before {following}.")


def _about_itself(random: Random) -> Exchange:
    questions, answer = random.choice(world.ABOUT_ITSELF)
    return Exchange(random.choice(questions), answer)


def _echo(random: Random) -> Exchange:
    """Copying is what answers about a scene are made of; asked for alone, of any word, it comes sooner."""
    in_form = random.choice((str, str, str.capitalize, str.upper))
    own = (*world.NAMES, *world.THINGS, *world.COLOURS, *world.COUNTED)
    words = [
        word if word in own else in_form(word)
        for word in random.sample((*own, *world.COMMON_WORDS), random.randint(1, 3))
    ]
    if len(words) == 1:
        return Exchange(f"Say the word {words[0]}.", f"The word is {words[0]}.")
    return Exchange(f"Say the words {', '.join(words)}.", f"The words are {', '.join(words)}.")


def _mood(random: Random) -> Exchange:
    name, other = random.sample(world.NAMES, 2)
    mood, another = random.sample(world.MOODS, 2)
    facts = random.sample((f"{name} is {mood}.", f"{other} is {another}."), 2)
    return Exchange(f"{' '.join(facts)} How is {name}?", f"{name} is {mood}.")


_FACTS: tuple[Callable[[Random], Exchange], ...] = (
    *(_sum, _sum, _sum, _next_number, _opposite, _animal, _ability, _size, _kind),
    *(_seen_colour, _day, _about_itself, _echo, _echo, _mood),
)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
