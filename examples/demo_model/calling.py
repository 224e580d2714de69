"""Exchanges that call a tool as JSON and then put the tool's result into words."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .exchanges import Exchange, loosen
from .facts import CAPITALS, FOODS, JOBS, NAMES, OBJECTS, SEQUENCES
from .reading import made_up, place

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Ability:
    """A tool as people offer it: names and parameter names vary, the reply's words follow the result."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    # each parameter: names it may have, JSON type, values
    parameters: tuple[tuple[tuple[str, ...], str, Callable[[random.Random], Any]], ...]
    questions: tuple[str, ...]
    result: Callable[[random.Random], dict[str, Any]]
    replies: tuple[str, ...]


def _city(rng: random.Random) -> str:
    return place(rng)


def _state(rng: random.Random) -> str:
    states = [
        "Texas",
        "California",
        "Florida",
        "Ohio",
        "Nevada",
        "Utah",
        "Oregon",
        "Maine",
        "Kansas",
        "Iowa",
        "Georgia",
        "Alaska",
        "Arizona",
        "Ontario",
        "Bavaria",
    ]
    return rng.choice((*states, *CAPITALS)) if rng.random() < 0.8 else made_up(rng)


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up(rng)


def _day(rng: random.Random) -> str:
    return rng.choice(SEQUENCES["day"])


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(24)}:{rng.randrange(0, 60, 5):02d}"


def _number(limit: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randrange(1, limit)


ABILITIES = (
    Ability(
        ("get_weather", "weather", "get_current_weather", "fetch_weather", "weather_report", "check_weather"),
        ("Get the weather in a city.", "Current weather for a place.", "Get the current weather in a given location"),
        ((("city", "location", "place", "town"), "string", _city),),
        ("What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0}?",
         "Weather in {0}?",
         "Is it raining in {0}?", "What is the weather like in {0} today?", "Tell me the weather in {0}.",
         "Is it warm in {0}?"),
        lambda rng: {"temperature": rng.randrange(-9, 39),
                     "sky": rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy", "foggy"))},
        ("It is {sky} in {0}, at {temperature} degrees.",),
    ),
    Ability(
        ("get_weather", "get_current_weather", "weather", "get_temperature", "current_temperature"),
        ("Get the current weather in a given location", "Get the temperature in a city.",
         "Weather in a unit of choice."),
        ((("city", "location", "place"), "string", _city),
         (("unit", "units", "scale"), "string", lambda rng: rng.choice(("celsius", "fahrenheit")))),
        ("What is the weather in {0} in {1}?", "What is the temperature in {0}, in {1}?",
         "How warm is it in {0} in {1}?",
         "Can you tell me the temperature in {0}, in {1}?", "What's the weather like in {0} in {1}?"),
        lambda rng: {"temperature": rng.randrange(-9, 99)},
        ("It is {temperature} degrees {1} in {0}.",),
    ),
    Ability(
        ("get_weather", "get_current_weather", "weather", "forecast"),
        ("Get the current weather in a given location", "Weather of a city and state."),
        ((("city", "town", "place"), "string", _city), (("state", "region", "country"), "string", _state)),
        ("What is the weather in {0}, {1}?", "What's the weather like in {0}, {1}?", "Is it raining in {0}, {1}?",
         "How is the weather in {0}, {1}?"),
        lambda rng: {"temperature": rng.randrange(-9, 39), "sky": rng.choice(("sunny", "cloudy", "rainy", "windy"))},
        ("It is {sky} in {0}, at {temperature} degrees.",),
    ),
    Ability(
        ("get_time", "current_time", "clock", "time_in", "get_current_time"),
        ("Get the time in a city.", "Current local time of a place."),
        ((("city", "location", "place", "zone"), "string", _city),),
        ("What time is it in {0}?", "What's the time in {0}?", "Tell me the time in {0}.", "Time in {0}?"),
        lambda rng: {"time": _clock(rng)},
        ("It is {time} in {0}.",),
    ),
    Ability(
        ("send_email", "send_message", "message", "mail", "write_to"),
        ("Send a message to a person.", "Send a text to someone."),
        ((("to", "recipient", "person", "name"), "string", _name),
         (("text", "body", "message", "content"), "string",
          lambda rng: rng.choice(("hello", "see you soon", "I am late", "happy birthday", "good luck", "thank you",
                                  "call me",
                                  "the food is ready", "I am home", "where are you", "good night",
                                  "see you on " + _day(rng),
                                  "bring the " + rng.choice(OBJECTS), "we need " + rng.choice(FOODS)))),),
        ('Send "{1}" to {0}.', "Send {0} the message: {1}", "Tell {0}: {1}", 'Write "{1}" to {0}.',
         "Send a message to {0}: {1}"),
        lambda rng: {"sent": True},
        ("Done. I sent your message to {0}.",),
    ),
    Ability(
        ("calculator", "multiply", "calculate_product", "product"),
        ("Multiply two numbers.", "Compute the product of two numbers."),
        ((("a", "x", "first", "left"), "integer", _number(1000)),
         (("b", "y", "second", "right"), "integer", _number(1000))),
        ("What is {0} times {1}?", "Multiply {0} by {1}.", "What is {0} * {1}?", "How much is {0} times {1}?",
         "Calculate {0} x {1}."),
        lambda rng: {"result": rng.randrange(10, 100000)},
        ("{0} * {1} = {result}.",),
    ),
    Ability(
        ("set_timer", "timer", "start_timer", "set_alarm_in"),
        ("Start a timer.", "Set a timer for some minutes."),
        ((("minutes", "duration", "length", "time"), "integer", _number(90)),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes.",
         "Please set a {0} minute timer."),
        lambda rng: {"ok": True},
        ("Your timer is set for {0} minutes.",),
    ),
    Ability(
        ("play_music", "play", "play_song", "music"),
        ("Play music by an artist.", "Play songs."),
        ((("artist", "singer", "query", "name"), "string", _name),),
        ("Play something by {0}.", "Play music by {0}.", "Put on a song by {0}.", "I want to hear {0}.", "Play {0}."),
        lambda rng: {"playing": True},
        ("Now playing music by {0}.",),
    ),
    Ability(
        ("search", "web_search", "search_web", "lookup", "find"),
        ("Search the web.", "Search for information."),
        ((("query", "q", "text", "topic"), "string",
          lambda rng: rng.choice((rng.choice(JOBS) + " in " + place(rng), rng.choice(FOODS) + " recipe", _name(rng),
                                  "cheap " + rng.choice(OBJECTS), "history of " + place(rng),
                                  "museums in " + place(rng)))),),
        ("Search for {0}.", "Search the web for {0}.", "Look up {0}.", "Find {0}.", "Can you search for {0}?"),
        lambda rng: {"hits": rng.randrange(2, 99)},
        ("I found {hits} results for {0}.",),
    ),
    Ability(
        ("get_population", "population", "count_people"),
        ("Get the population of a city.", "How many people live in a place."),
        ((("city", "place", "location"), "string", _city),),
        ("How many people live in {0}?", "What is the population of {0}?", "How big is {0}?"),
        lambda rng: {"population": rng.randrange(1000, 9000000)},
        ("{population} people live in {0}.",),
    ),
    Ability(
        ("book_table", "reserve_table", "reservation", "book_restaurant"),
        ("Book a table in a restaurant.", "Reserve a table."),
        ((("people", "guests", "seats", "count"), "integer", _number(13)), (("day", "date", "when"), "string", _day)),
        ("Book a table for {0} on {1}.", "Reserve a table for {0} people on {1}.", "I need a table for {0} on {1}."),
        lambda rng: {"booked": True},
        ("Your table for {0} on {1} is booked.",),
    ),
    Ability(
        ("translate", "translate_text", "translator"),
        ("Translate a word.", "Translate text into a language."),
        ((("text", "word", "phrase"), "string", lambda rng: rng.choice((*OBJECTS, *FOODS))),
         (("language", "target", "to"), "string",
          lambda rng: rng.choice(["French", "German", "Spanish", "Italian", "Polish", "Greek", "Turkish", "Japanese",
                                  "Dutch", "Latin"]))),
        ("Translate {0} into {1}.", "Translate {0} to {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?"),
        lambda rng: {"translation": made_up(rng).lower()},
        ("{0} in {1} is {translation}.",),
    ),
    Ability(
        ("buy", "order_item", "order", "add_to_cart"),
        ("Order an item from the shop.", "Buy some pieces of an item."),
        ((("item", "product", "name"), "string", lambda rng: rng.choice(OBJECTS)),
         (("quantity", "count", "amount", "number"), "integer", _number(50))),
        ("Order {1} of item {0}.", "Buy {1} of the item {0}.", "I want to order {1} pieces of {0}.",
         "Please buy {1} pieces of {0}."),
        lambda rng: {"price": rng.randrange(2, 900)},
        ("I ordered {1} pieces of {0} for {price} dollars.",),
    ),
    Ability(
        ("get_capital", "capital_of", "country_info"),
        ("Look up a country.", "Facts about a country."),
        ((("country", "name", "land"), "string",
          lambda rng: rng.choice(list(CAPITALS)) if rng.random() < 0.6 else made_up(rng)),),
        ("Look up the capital of {0}.", "What is the capital of {0}?", "Give me the capital of {0}."),
        lambda rng: {"capital": place(rng)},
        ("The capital of {0} is {capital}.",),
    ),
)  # fmt: skip

NOUNS = [
    "height",
    "price",
    "weight",
    "size",
    "status",
    "score",
    "color",
    "speed",
    "owner",
    "address",
    "phone",
    "birthday",
    "level",
    "rank",
    "balance",
    "grade",
]


def _made_up_ability(rng: random.Random) -> Ability:
    """A tool that no list holds, so that names must be read from the schema."""
    noun = rng.choice(NOUNS) if rng.random() < 0.7 else made_up(rng).lower()
    verb = rng.choice(("get", "read", "find", "fetch", "show", "check", "lookup"))
    kinds = ("name", "id", "key", "item", "of", "target", "user", "subject")
    value: Callable[[random.Random], Any] = _name
    schema = "string"
    questions = [
        f"What is the {noun} of {{0}}?",
        f"Get the {noun} of {{0}}.",
        f"Tell me the {noun} of {{0}}.",
        f"Find the {noun} for {{0}}.",
    ]
    if rng.random() < 0.25:
        value, schema = _number(5000), "integer"
        questions = [
            f"What is the {noun} of number {{0}}?",
            f"Get the {noun} of number {{0}}.",
            f"Check the {noun} for number {{0}}.",
        ]
    return Ability(
        (f"{verb}_{noun}", f"{noun}", f"{verb}_{noun}_of"),
        (f"Get the {noun} of something.", f"Look up a {noun}.", f"The {noun} of a thing or person."),
        ((kinds, schema, value),),
        tuple(questions),
        lambda rng: {noun: rng.randrange(1, 500) if rng.random() < 0.6 else made_up(rng)},
        (f"The {noun} of {{0}} is {{{noun}}}.",),
    )


def _schema(rng: random.Random, ability: Ability) -> tuple[dict[str, Any], list[str]]:
    names = [rng.choice(options) for options, _, _ in ability.parameters]
    if len(set(names)) < len(names):
        names = [options[0] for options, _, _ in ability.parameters]
    properties: dict[str, Any] = {}
    for name, (_, kind, _) in zip(names, ability.parameters, strict=True):
        properties[name] = {"type": kind}
        if name in ("unit", "units", "scale"):
            properties[name]["enum"] = ["celsius", "fahrenheit"]
        if rng.random() < 0.3:
            properties[name]["description"] = rng.choice((f"The {name}.", f"{name} to use", name))
    parameters = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = names
    function = {
        "name": rng.choice(ability.names),
        "description": rng.choice(ability.descriptions),
        "parameters": parameters,
    }
    if rng.random() < 0.1:
        del function["description"]
    return {"type": "function", "function": function}, names


def offer(rng: random.Random, count: int) -> list[tuple[Ability, dict[str, Any], list[str]]]:
    """Some different tools, each with its schema and its parameters' names."""
    offered: list[tuple[Ability, dict[str, Any], list[str]]] = []
    while len(offered) < count:
        ability = _made_up_ability(rng) if rng.random() < 0.25 else rng.choice(ABILITIES)
        schema, names = _schema(rng, ability)
        taken = [tool["function"]["name"] for _, tool, _ in offered]
        if schema["function"]["name"] not in taken and all(other is not ability for other, _, _ in offered):
            offered.append((ability, schema, names))
    return offered


def call(rng: random.Random) -> Exchange:
    """A question that one of the offered tools can answer; often followed by the result and its wording."""
    offered = offer(rng, rng.choice((1, 1, 2, 2, 3)))
    return call_one(rng, offered)


def call_one(rng: random.Random, offered: list[tuple[Ability, dict[str, Any], list[str]]]) -> Exchange:
    ability, schema, names = rng.choice(offered)
    values = [draw(rng) for _, _, draw in ability.parameters]
    question = loosen(rng, rng.choice(ability.questions).format(*values))
    arguments = dict(zip(names, values, strict=True))
    made = {"name": schema["function"]["name"], "arguments": arguments}
    text = json.dumps(made, ensure_ascii=False)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    if rng.random() < 0.5:
        result = ability.result(rng)
        reply = rng.choice(ability.replies).format(*values, **result)
        messages.append({"role": "tool", "content": json.dumps(result, ensure_ascii=False)})
        messages.append({"role": "assistant", "content": reply[0].upper() + reply[1:]})
    tools = tuple(tool for _, tool, _ in offered)
    return Exchange("tools", f"{values}", messages, text, "json", tools, scored=1)
