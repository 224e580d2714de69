"""Word lists and everyday facts that the dialogue generators draw from; knows nothing of dialogues.

Every list is hand-made and short enough for a model of two million parameters to learn by heart.
"""


def _words(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Rosa Sam Tina Tom Uma Victor "
    "Wendy Zoe Alice Bob Carlos Diana Elena Frank George Hannah Ivan Julia Karl Laura Martin Nora Olga Peter Quinn "
    "Rita Simon Sofia Thomas Vera Walter Yara Adam Bella Chris Dora Eric Fiona Gina Hugo Ida Jonas Kim Lisa Max Noah "
    "Otto Priya Ravi Sara Theo Ursula Vincent Will Yuki Amir Bianca Chen Dmitri Esther Fatima Gabriel Hana Ines Jorge "
    "Kofi Lars Mei Nadia Omar Pablo Rachel Stefan Tara Mark "
    "Lucy James Mary John Susan Mike Linda Alex Daniel Jane Robert"
)

CAPITALS = _pairs(
    "France:Paris Italy:Rome Spain:Madrid Germany:Berlin Portugal:Lisbon Greece:Athens Austria:Vienna Poland:Warsaw "
    "Hungary:Budapest Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Belgium:Brussels "
    "Russia:Moscow Ukraine:Kyiv Turkey:Ankara Egypt:Cairo Kenya:Nairobi Japan:Tokyo China:Beijing India:Delhi "
    "Thailand:Bangkok Vietnam:Hanoi Canada:Ottawa Cuba:Havana Peru:Lima Chile:Santiago Iran:Tehran Iraq:Baghdad "
    "Switzerland:Bern England:London Scotland:Edinburgh Iceland:Reykjavik Romania:Bucharest Bulgaria:Sofia "
    "Croatia:Zagreb Serbia:Belgrade Indonesia:Jakarta Australia:Canberra Colombia:Bogota Nepal:Kathmandu"
) | {
    "the United States": "Washington", "Brazil": "Brasilia", "Mexico": "Mexico City", "Argentina": "Buenos Aires",
    "the Netherlands": "Amsterdam", "South Korea": "Seoul", "Morocco": "Rabat", "New Zealand": "Wellington",
    "South Africa": "Pretoria", "Pakistan": "Islamabad", "Ethiopia": "Addis Ababa", "Saudi Arabia": "Riyadh",
    "Jamaica": "Kingston", "the Czech Republic": "Prague", "Slovakia": "Bratislava", "Slovenia": "Ljubljana",
    "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius", "Ghana": "Accra", "the United Kingdom": "London",
    "Great Britain": "London", "Nigeria": "Abuja", "the USA": "Washington",
    "the Philippines": "Manila", "Wales": "Cardiff",
}  # fmt: skip

CITIES = sorted(
    set(CAPITALS.values())
    | set(
        _words(
            "Milan Munich Boston Chicago Hamburg Lyon Naples Porto Seville Toronto Sydney Dallas Denver Miami "
            "Geneva Oxford Bristol Leeds Glasgow Osaka Mumbai Shanghai Dubai Venice Florence "
            "Krakow Zurich Seattle Houston Phoenix"
        )
    )
)

OPPOSITES = _pairs(
    "hot:cold big:small up:down left:right day:night good:bad fast:slow old:young happy:sad open:closed early:late "
    "light:dark full:empty hard:soft high:low long:short rich:poor strong:weak wet:dry black:white in:out on:off "
    "yes:no true:false loud:quiet clean:dirty easy:difficult near:far thick:thin wide:narrow first:last always:never "
    "love:hate win:lose buy:sell push:pull start:stop give:take north:south east:west summer:winter before:after "
    "above:below inside:outside heavy:light tall:short deep:shallow sharp:blunt sweet:sour brave:afraid alive:dead "
    "asleep:awake begin:end friend:enemy laugh:cry remember:forget question:answer more:less many:few safe:dangerous"
)

COLOURS = _words("red blue green yellow black white orange purple brown pink grey")

THING_COLOURS = _pairs(
    "grass:green snow:white blood:red coal:black milk:white chocolate:brown tomatoes:red lemons:yellow leaves:green "
    "carrots:orange bananas:yellow strawberries:red oranges:orange cherries:red clouds:white frogs:green butter:yellow "
    "ravens:black polar_bears:white elephants:grey flamingos:pink pumpkins:orange peas:green fire_engines:red"
) | {"the sky": "blue", "the sun": "yellow", "the sea": "blue", "the night sky": "black"}

ANIMAL_SOUNDS = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "sheep": "baa",
    "duck": "quack",
    "pig": "oink",
    "lion": "roar",
    "horse": "neigh",
    "bee": "buzz",
    "frog": "ribbit",
    "owl": "hoot",
    "snake": "hiss",
    "wolf": "howl",
    "mouse": "squeak",
    "rooster": "cock-a-doodle-doo",
}

LEGS = {
    "dog": 4,
    "cat": 4,
    "spider": 8,
    "bird": 2,
    "ant": 6,
    "horse": 4,
    "snake": 0,
    "cow": 4,
    "bee": 6,
    "fish": 0,
    "duck": 2,
    "person": 2,
    "octopus": 8,
    "chair": 4,
    "fly": 6,
    "elephant": 4,
}

BABIES = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "sheep": "lamb",
    "horse": "foal",
    "hen": "chick",
    "duck": "duckling",
    "pig": "piglet",
    "goat": "kid",
    "bear": "cub",
    "lion": "cub",
    "frog": "tadpole",
    "swan": "cygnet",
    "goose": "gosling",
}

KINDS = {
    "fruits": _words("apple banana cherry grape lemon mango orange peach pear plum melon kiwi"),
    "vegetables": _words("carrot potato onion pea bean cabbage spinach leek tomato cucumber pepper"),
    "animals": _words("dog cat horse cow lion tiger bear fox wolf rabbit sheep goat elephant monkey zebra"),
    "birds": _words("robin eagle owl duck swan crow raven sparrow parrot penguin goose"),
    "colours": COLOURS,
    "tools": _words("hammer saw drill wrench screwdriver axe shovel rake"),
    "instruments": _words("piano guitar violin flute drum trumpet cello harp"),
    "drinks": _words("water tea coffee milk juice lemonade cocoa"),
    "clothes": _words("shirt coat hat sock shoe dress scarf glove jacket"),
    "flowers": _words("rose tulip daisy lily violet sunflower poppy iris"),
    "trees": _words("oak pine birch maple willow elm ash beech"),
    "planets": _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "sports": _words("football tennis swimming running hockey golf basketball chess"),
    "cities": _words("Paris Rome Berlin Tokyo Madrid London Cairo Oslo"),
}

SEQUENCES = {
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "month": _words("January February March April May June July August September October November December"),
    "letter": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "season": _words("spring summer autumn winter"),
    "planet": _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
}

COUNTS = {
    "days are in a week": "There are 7 days in a week.",
    "months are in a year": "There are 12 months in a year.",
    "hours are in a day": "There are 24 hours in a day.",
    "minutes are in an hour": "There are 60 minutes in an hour.",
    "seconds are in a minute": "There are 60 seconds in a minute.",
    "days are in a year": "There are 365 days in a year, and 366 in a leap year.",
    "letters are in the alphabet": "There are 26 letters in the English alphabet.",
    "seasons are in a year": "There are 4 seasons in a year: spring, summer, autumn and winter.",
    "sides does a triangle have": "A triangle has 3 sides.",
    "sides does a square have": "A square has 4 sides.",
    "wheels does a car have": "A car has 4 wheels.",
    "wheels does a bicycle have": "A bicycle has 2 wheels.",
    "fingers does a hand have": "A hand has 5 fingers.",
    "planets are there": "There are 8 planets in the solar system.",
    "eyes does a person have": "A person has 2 eyes.",
    "continents are there": "There are 7 continents.",
    "cents are in a dollar": "There are 100 cents in a dollar.",
    "years are in a century": "There are 100 years in a century.",
    "things are in a dozen": "There are 12 things in a dozen.",
}

JOBS = _words(
    "teacher doctor nurse baker farmer driver painter singer writer cook pilot judge lawyer dentist gardener sailor "
    "engineer tailor waiter student scientist musician actor builder plumber librarian carpenter photographer"
)
HOBBIES = _words(
    "reading swimming dancing chess painting cooking running fishing hiking singing skating gardening cycling drawing "
    "climbing sewing football tennis photography baking"
)
FOODS = _words(
    "pizza soup rice bread cheese pasta salad cake apples fish noodles pancakes honey chocolate beans eggs tomatoes "
    "curry potatoes mushrooms grapes cookies"
)
PETS = _words("dog cat parrot rabbit hamster turtle goldfish horse mouse snake lizard canary pony duck")
OBJECTS = _words(
    "key coin ring book pen cup ball map watch lamp letter stone feather shell button candle rope spoon doll bell "
    "knife hat glove mirror flute apple ticket photo clock brush"
)
PLACES = _words("kitchen garden attic cellar garage office bedroom hall library shed barn drawer tower shop")
CONTAINERS = _words("box bag basket jar chest bucket drawer case tin crate")
