"""Which characters of a rendered chat are trained, found by brute force.

No placeholders, no generation tags, no offsets. A character belongs to a message if exchanging one character
of the message exchanges it in the rendering, so every letter and digit of every message is exchanged once and
the whole chat rendered again. A turn starts where the rendering of the messages before it, with a generation
prompt, and the rendering of all messages part; it ends with the first of the tokens that the model is known
to stop on. Those are in a table by hand.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_PIECES = re.compile(r"<[^<>\s]*>|\s|[^<\s]+|<")

Render = Callable[[list[dict[str, Any]], bool], str]
Adjust = Callable[[Render, list[dict[str, Any]], list[Any]], list[Any]]
Path = tuple[Any, ...]


class CannotTellError(Exception):
    """The rendering does not show where a turn is: refusing it is right."""


@dataclass(frozen=True)
class Leaf:
    """One exchangeable character: of which message, at which place in it, and where it was printed."""

    message: int
    path: Path
    index: int
    positions: tuple[int, ...]


def trained_characters(render: Render, messages: list[dict[str, Any]], stops: list[str]) -> list[bool | None]:
    """One flag per character of ``render(messages, False)``; None where both are right.

    Both are right for what stands between the part of a generation prompt that is there and the turn itself:
    a think block that the prompt opens otherwise than this answer, or a header that the prompt did not write.

    Args:
        render: (messages, whether to add a generation prompt) to text.
        messages: With string contents.
        stops: Tokens on which generation stops; none if the template writes none.

    Raises:
        CannotTellError: If the rendering does not show it.
    """
    text = render(messages, False)
    leaves = exchanged(render, messages, text)
    marks: list[bool | None] = [False] * len(text)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _turn(render, messages, index, text, leaves, stops)
            marks[start:end] = [True] * (end - start)
            zones = list(_open_zones(render, text, start, end))
            if not _plain_prompt(render).strip() and messages[index - 1]["role"] != "user":
                # No prompt says whether white space between a result and the answer belongs to the answer.
                zones.append((start, start + len(text[start:end]) - len(text[start:end].lstrip())))
            for low, high in zones:
                marks[low:high] = [None] * (high - low)
    return marks


def _open_zones(render: Render, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    header = _plain_prompt(render)
    before = re.search(r"(?:</?think[^<>]*>|<\|channel>thought|<channel\|>|\s)*$", text[:start])
    if before and before[0].strip():
        yield start - len(before[0]), start
    within = re.match(r"\s*(?:<think>\s*)?(?:</think>\s*)?", text[start:end])
    if within and "think>" in header:
        yield start, start + len(within[0])
    if header.strip() and text.startswith(header, start):
        yield start, start + len(header)


def _plain_prompt(render: Render) -> str:
    question = [{"role": "user", "content": "q"}]
    asked, prompted = render(question, False), render(question, True)
    return prompted[len(asked) :] if prompted.startswith(asked) else ""


def expected(
    renders: Iterable[Render], messages: list[dict[str, Any]], stops: list[str], adjust: Adjust | None = None
) -> tuple[str, list[bool | None], bool] | str:
    """(text, marks of its characters, whether a text of an answer is not in it), or why there are none."""
    reason = ""
    for render in renders:
        try:
            marks = trained_characters(render, messages, stops)
            marks = adjust(render, messages, marks) if adjust else marks
            return render(messages, False), marks, leaves_out(render, messages)
        except CannotTellError as error:
            reason = str(error)
        except Exception as error:
            reason = reason or f"the template raises: {error}"
    return reason


def difference(tokenizer: Any, text: str, characters: list[bool | None], encoded: Any) -> str:
    """Where the labels of a row are others than the marks of its text; "" if nowhere."""
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if whole["input_ids"] != encoded.input_ids:
        return "the tokens are others"
    for (start, _), label in zip(whole["offset_mapping"], encoded.labels, strict=True):
        wanted = characters[start]
        if wanted is not None and wanted != (label != -100):
            kind = "not trained" if wanted else "trained"
            return f"{kind}: {text[max(0, start - 60) : start]!r} >>> {text[start : start + 60]!r}"
    return ""


def exchanged(render: Render, messages: list[dict[str, Any]], text: str) -> list[Leaf]:
    """Every letter and digit of the messages, with the positions that change when it is exchanged."""
    leaves = []
    for message, path, value in _strings(messages):
        tags = {i for tag in re.finditer("</?think>", value) for i in range(*tag.span())}
        for index, char in enumerate(value):
            other = _other(char)
            if other is None or index in tags:  # templates look for these
                continue
            again = render(_with(messages, message, path, value[:index] + other + value[index + 1 :]), False)
            if len(again) != len(text):
                raise CannotTellError("the length of the rendering depends on what is written")
            where = tuple(i for i, (a, b) in enumerate(zip(text, again, strict=True)) if a != b)
            if path[-1] == "name":  # of a call; it stands again in front of the result
                where = where[:1]
            leaves.append(Leaf(message, path, index, where))
    return leaves


def leaves_out(render: Render, messages: list[dict[str, Any]]) -> bool:
    """Whether a text of an answer is not printed, reasoning before the last question aside."""
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    texts: dict[tuple[int, Path, int], list[Leaf]] = {}
    for leaf in exchanged(render, messages, render(messages, False)):
        if messages[leaf.message]["role"] != "assistant":
            continue
        content = messages[leaf.message]["content"]
        before = len(re.findall("</?think>", content[: leaf.index])) if leaf.path == ("content",) else 0
        is_inside = before % 2 == 1 and "</think>" in content[leaf.index :]
        thinks = leaf.path == ("reasoning_content",) or is_inside
        if leaf.message > last_question or not thinks:
            texts.setdefault((leaf.message, leaf.path, before), []).append(leaf)
    return any(not any(leaf.positions for leaf in leaves) for leaves in texts.values())


def _turn(
    render: Render,
    messages: list[dict[str, Any]],
    index: int,
    text: str,
    leaves: list[Leaf],
    stops: list[str],
) -> tuple[int, int]:
    own = [leaf for leaf in leaves if leaf.message == index]
    printed = sorted(position for leaf in own for position in leaf.positions)
    others = {p for leaf in leaves if leaf.message != index for p in leaf.positions}
    if own and not printed:
        raise CannotTellError(f"message {index} is not printed")
    if any(len(leaf.positions) > 1 for leaf in own):
        raise CannotTellError(f"a character of message {index} is printed twice")
    if printed and any(printed[0] < position < printed[-1] for position in others):
        raise CannotTellError(f"message {index} is torn apart")
    start = _start(render, messages, index, text, leaves)
    after = max([start, *(position + 1 for position in printed)])
    ceiling = min([position for position in others if position >= after], default=len(text))
    found = [(text.find(stop, after), len(stop)) for stop in stops if stop in text[after:]]
    # Punctuation at the end of a content cannot be exchanged, but it is the content's.
    tail = _tail(messages[index])
    if found:
        at, length = min(found, key=lambda pair: (pair[0], -pair[1]))
        # A stop that the message itself has written after its last letter is not the end of the turn.
        for _ in range(tail.count(text[at : at + length])):
            at = text.index(text[at : at + length], at + length)
        if at < ceiling:
            return start, at + length
    if not own or "tool_calls" in messages[index]:  # up to where it would end as the last message
        ended = max(after, len(text[: _common(render(messages[: index + 1], False), text)].rstrip()))
        blank = "" if own else str(messages[index]["content"])
        return start, ended + len(blank) * text.startswith(blank, ended)
    while tail and not text.startswith(tail, after):
        tail = tail[:-1]
    return start, after + len(tail)


def _start(render: Render, messages: list[dict[str, Any]], index: int, text: str, leaves: list[Leaf]) -> int:
    """Where the text of the messages before, with a generation prompt, and the whole text part.

    Counted from the last character of earlier messages that both have.
    """
    before = messages[:index]
    if not before:
        raise CannotTellError("the chat begins with the assistant")
    prompted = render(before, True)
    earlier = exchanged(lambda given, _: render(given, True), before, prompted)
    here = {(leaf.message, leaf.path, leaf.index): leaf.positions for leaf in leaves}
    anchors = [
        (leaf.positions[-1], here[key][-1])
        for leaf in earlier
        if leaf.positions and here.get(key := (leaf.message, leaf.path, leaf.index))
    ]
    there, at = max(anchors, default=(-1, -1))
    common = _common(prompted[there + 1 :], text[at + 1 :])
    asked = render(before, False)
    prompt_at = len(asked) if prompted.startswith(asked) else 0
    if prompted[prompt_at:].strip() and not prompted[prompt_at : there + 1 + common].strip():
        raise CannotTellError(f"message {index} does not follow a generation prompt")
    return at + 1 + common


def _common(first: str, second: str) -> int:
    """Length of what both begin with; half a tag or half a token does not count."""
    common = 0
    for piece in _PIECES.findall(first):
        if not second.startswith(piece, common):
            break
        common += len(piece)
    return common


def _tail(message: dict[str, Any]) -> str:
    """What follows the last letter or digit of a message's content."""
    content = "" if "tool_calls" in message else str(message["content"])
    return content[max((i + 1 for i, char in enumerate(content) if _other(char) is not None), default=0) :]


def _strings(messages: list[dict[str, Any]]) -> Iterator[tuple[int, Path, str]]:
    def walk(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, str(value)
        elif path and path[-1] == "function" and not list(walk(value["arguments"], ())):
            yield (*path, "name"), value["name"]
        elif isinstance(value, dict):
            for key, item in value.items():
                if key not in ("role", "type", "id", "tool_call_id", "name"):
                    yield from walk(item, (*path, key))
        elif isinstance(value, list):
            for key, item in enumerate(value):
                yield from walk(item, (*path, key))

    for number, message in enumerate(messages):
        for path, value in walk(message, ()):
            yield number, path, value


def _with(messages: list[dict[str, Any]], message: int, path: Path, value: str) -> list[dict[str, Any]]:
    changed = copy.deepcopy(messages)
    place: Any = changed[message]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = type(place[path[-1]])(value)
    return changed


def _other(char: str) -> str | None:
    """Another character of its kind; None for what may mean something to a template."""
    if not char.isascii() or not char.isalnum():
        return None
    if char.isdigit():
        return "7" if char != "7" else "3"
    return ("q" if char != "q" else "x") if char.islower() else ("Q" if char != "Q" else "X")


# --- chats ------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_TEXTS = ["hi", "Ok 7", " so ", "a\n\nb\n", "🙂é ok", "no!", "{x}", "日本 x", "", "\n ", "Hello there."]


def chats(specials: list[str], prompt: str, count: int = 30) -> list[tuple[str, list[dict[str, Any]], Any]]:
    """(what is special, messages, tools): a fixed list of hard ones, then random ones.

    Args:
        specials: Tokens of the template, which users quote.
        prompt: Its generation prompt, which users quote too.
        count: How many at least.
    """

    quote = prompt + "no" + (specials[0] if specials else "")
    found: list[tuple[str, list[dict[str, Any]], Any]] = [
        ("plain", turns("hi", "hello"), None),
        ("two turns", turns("hi", "hello", "more", "yes"), None),
        ("ends with the user", turns("hi", "hello", "more"), None),
        ("same text", turns("hello", "hello", "hello", "hello"), None),
        ("white space", turns(" hi\n", "\n a b \n", "c", " d\n\n"), None),
        ("emoji", turns("🙂a", "🙂é b🙂", "日本", "x🙂"), None),
        ("empty answer", turns("hi", "", "more", "yes"), None),
        ("empty last answer", turns("hi", "yes", "more", ""), None),
        ("blank answer", turns("hi", " \n", "more", "yes"), None),
        ("quoted prompt", turns(quote, "yes", quote, "no"), None),
        ("answer in the question", turns("say yes yes", "yes", "yes", "yes yes"), None),
        ("system", [{"role": "system", "content": "be kind"}, *turns("hi", "hello", "so", "ok")], None),
        ("tools unused", turns("hi", "hello"), TOOLS),
        ("braces", turns("{{ x }}", "{% y %} z", "<b>", "</b> 1"), None),
    ]
    found += _reasoning() + _tool_chats()
    generator, quoted = random.Random(0), [f"a{special}b" for special in specials[:3]]
    while len(found) < count:
        texts = [
            "".join(generator.choices([*_TEXTS, *quoted], k=generator.randint(1, 3)))
            for _ in range(2 * generator.randint(1, 3))
        ]
        found.append(("random", turns(*texts), None))
    return found


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _reasoning() -> list[tuple[str, list[dict[str, Any]], Any]]:
    hi, one, more, two = turns("hi", "one", "more", "two")
    first, last = {**one, "reasoning_content": "think a"}, {**two, "reasoning_content": "think b"}
    return [
        ("reasoning", [hi, one, more, {**two, "reasoning_content": "let me see"}], None),
        ("reasoning twice", [hi, first, more, last], None),
        ("think tags", turns("hi", "<think>\nabc\n</think>\n\nAnswer", "so", "<think>d</think>e"), None),
    ]


def _tool_chats() -> list[tuple[str, list[dict[str, Any]], Any]]:
    def call(city: str, number: int) -> dict[str, Any]:
        function = {"name": "weather", "arguments": {"city": city}}
        return {"id": f"call{number:05d}", "type": "function", "function": function}

    def answer(content: str, number: int) -> dict[str, Any]:
        return {"role": "tool", "name": "weather", "content": content, "tool_call_id": f"call{number:05d}"}

    user, done = turns("weather?", "sunny")
    one = {"role": "assistant", "content": "", "tool_calls": [call("Oslo", 1)]}
    said = {**one, "content": "I look"}
    two = {**one, "tool_calls": [call("Oslo", 1), call("Rome", 2)]}
    return [
        ("tool call last", [user, one], TOOLS),
        ("tool call", [user, one, answer(json.dumps({"sky": "rain"}), 1), done], TOOLS),
        ("tool call with text", [user, said, answer("fine", 1), done], TOOLS),
        ("two tool calls", [user, two, answer("a b", 1), answer("c", 2), done], TOOLS),
        (
            "tools twice",
            copy.deepcopy([user, one, answer("wet", 1), done])
            + copy.deepcopy([user, said, answer("dry", 1), done]),
            TOOLS,
        ),
    ]
