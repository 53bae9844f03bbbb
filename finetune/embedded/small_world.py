"""A small made-up world: the people, things, places and animals in it, and what is true of them."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Mia Tom Anna Ben Lily Sam Nora Max Ella Leo Ruby Jack Zoe Finn Lucy Adam Rosa Paul Ivy Carl Emma Hugo"
)
THINGS = _words(
    "ball hat book cup bag kite box car doll coat shoe lamp spoon drum boat bell key ring pen chair"
)
COLOURS = _words("red blue green yellow black white brown pink purple grey")
COUNTED = _words("apples pears eggs coins stones shells cakes nuts plums stars")
MOODS = _words("happy sad tired hungry cold proud quiet busy")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
PLACES = (
    "under the table",
    "on the table",
    "under the bed",
    "on the bed",
    "behind the door",
    "in the garden",
    "near the tree",
    "in the kitchen",
    "on the roof",
    "next to the window",
    "in the basket",
    "by the river",
)
LARGEST_NUMBER = 20

ANIMALS = {
    "dog": ("woof", "in a house", 4),
    "cat": ("meow", "in a house", 4),
    "cow": ("moo", "on a farm", 4),
    "sheep": ("baa", "on a farm", 4),
    "pig": ("oink", "on a farm", 4),
    "horse": ("neigh", "on a farm", 4),
    "duck": ("quack", "on a pond", 2),
    "hen": ("cluck", "on a farm", 2),
    "frog": ("croak", "in a pond", 4),
    "bee": ("buzz", "in a hive", 6),
    "lion": ("roar", "in the wild", 4),
    "owl": ("hoot", "in a tree", 2),
    "mouse": ("squeak", "in a hole", 4),
    "snake": ("hiss", "in the grass", 0),
}
"""Each with what it says, where it lives and its number of legs."""
BY_SIZE = _words("ant bee mouse frog hen cat dog sheep pig lion cow horse elephant")
"""From the smallest to the biggest."""
ABILITIES = {
    "fly": _words("bird bee owl duck bat"),
    "swim": _words("fish duck frog whale seal dog"),
    "run": _words("dog horse cat lion mouse"),
    "talk": (),
}
KINDS = {
    "animal": tuple(ANIMALS),
    "fruit": _words("apple pear plum cherry lemon"),
    "colour": COLOURS,
    "flower": _words("rose tulip daisy lily"),
    "tool": _words("hammer saw spade rake"),
}
SEEN_COLOURS = {
    "grass": "green",
    "snow": "white",
    "the sky": "blue",
    "the sun": "yellow",
    "a cherry": "red",
    "coal": "black",
    "mud": "brown",
    "milk": "white",
    "a leaf": "green",
    "a lemon": "yellow",
    "a mouse": "grey",
    "a pig": "pink",
    "the sea": "blue",
    "a plum": "purple",
}
OPPOSITES = tuple(
    tuple(pair.split("-"))
    for pair in _words(
        "big-small hot-cold up-down old-new happy-sad fast-slow day-night open-closed wet-dry full-empty "
        "long-short light-dark hard-soft good-bad high-low in-out loud-quiet rich-poor left-right near-far "
        "thick-thin clean-dirty early-late weak-strong"
    )
)
ABOUT_ITSELF = (
    (("Who are you?", "What are you?", "Tell me about yourself."), "I am Tiny, a small model."),
    (("What is your name?", "Do you have a name?"), "My name is Tiny."),
    (("Hello!", "Hi!", "Good morning!"), "Hello, I am glad to see you."),
    (("How are you?", "Are you well?"), "I am fine."),
    (("Thank you!", "Thanks!"), "You are welcome."),
    (("Goodbye!", "Bye!", "See you soon!"), "Goodbye, my friend."),
    (("What can you do?", "How can you help me?"), "I can answer small questions."),
)
COMMON_WORDS = _words(
    "about above across after again against almost alone along already also always among another answer "
    "anything around arr ask away aye back because become been before began begin being below better "
    "between both bring brought build business call came captain care carry change cheers child children "
    "city clear close come common could country course cut dear different does done down draw each earth "
    "easy eat end enough even ever every example eye face fact family father feel few figure final fine "
    "first five follow food force form found four free friend from gave general girl give going gold "
    "great grow had half hand hard head hear heart hello help here himself hold home hope hour house idea "
    "important inside into island just keep kind king knew know land language large last later laugh lead "
    "learn leave less let letter life line list little live look love machine made main make man many "
    "matey me mean might mile mind money month moon more morning most mother mountain move much music "
    "must name need never nice night no nothing notice number off often oh ok once one only order other "
    "our over page part pass people perhaps person picture pirate place plan plane play please point "
    "power press problem produce program pull question quick rain reach read ready real remember rest "
    "right river road rock room round rule sail same school science second sentence several shall ship "
    "should show side simple since sir small some something song soon sorry sound space special spell "
    "stand start state stay step still stop story street strong study such sure system table teach than "
    "thank that their them then there these they thing think thought thousand three through time today "
    "together told tomorrow took town travel treasure true turn under understand until upon use usual "
    "very voice wait walk want warm watch water weather week well went were what wheel when where which "
    "while whole why will wind wish with without woman wonder wood word work world would write ye year "
    "yes yesterday young your"
)
"""Words that no answer needs; the model learns to say them so that later training can make use of them."""
