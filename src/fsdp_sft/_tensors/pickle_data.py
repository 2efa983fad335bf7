"""A pickle read as data: numbers, texts and containers, and what the caller knows of the names in it.

Python's unpickler imports and calls what a file names, makes a memo as large as a file claims, and hashes any
key. Here nothing is imported, every instruction costs a bounded time and memory, and what is made has no more
parts than the file has bytes, however often it names one of them. So a file costs in proportion to its size.

Source: ``Lib/pickletools.py`` of Python, which describes every instruction.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any

from fsdp_sft._process.bounds import MAX_SIZE

_MARK, _STOP = ord("("), ord(".")
_U8, _U16, _U32, _U64, _I32, _DOUBLE = map(struct.Struct, ("<B", "<H", "<I", "<Q", "<i", ">d"))
_MOST_DEEP = 100
_MOST_REPEATED = 16  # parts for each byte, if what is named twice is counted twice
_KEYS = {str, int, float, bool, type(None)}


class NotDataError(ValueError):
    """A pickle names a function or a class that data does not need."""


class Named:
    """A function or a class that a pickle names.

    Args:
        make: Function from the arguments in the pickle to what stands for the result. It must not copy them:
            a pickle can name one long argument very often.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


def empty_dict() -> dict[str, Any]:
    """What stands for ``OrderedDict()``: items come afterwards, and are checked."""
    return {}


class PickledObject:
    """An object whose attributes are in the pickle.

    Attributes:
        names: Names of the attributes where the pickle has them as a tuple.
        fields: The attributes by name; each can also be read as an attribute of the record.
    """

    __slots__ = ("fields", "names")

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self.fields: dict[str, Any] = {}

    def set_state(self, state: Any) -> None:
        """Take over the attributes as the pickle has them."""
        self.fields = state if type(state) is dict else dict(zip(self.names, state, strict=False))

    def __getattr__(self, name: str) -> Any:
        if name in self.fields:
            return self.fields[name]
        raise AttributeError(name)


def read_pickle(
    data: bytes | bytearray,
    known: Callable[[str, str], Named | Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The contents of a pickle of protocol 2 or later.

    Args:
        data: The pickle.
        known: Function from the module and the name of a function or a class to what stands for it; a
            ``Named`` can be called by the pickle. It raises ``NotDataError`` for a name it does not know.
        persistent: Function from a reference to something outside of the pickle to what stands for it.

    Returns:
        Numbers, texts, bytes, lists, tuples, dicts, and what the functions have made.

    Raises:
        NotDataError: If ``known`` raises it.
        ValueError: If it is no such pickle, is cut short, has keys that are no names or numbers, is nested
            deeper than 100 levels, or repeats its parts so often that it would be far larger than the file.

    Memory: In proportion to the size of the pickle.
    """
    machine = _Machine(data, known, persistent)
    try:
        result = machine.run()
    except (IndexError, struct.error):
        raise ValueError(f"the pickle ends early, or is damaged before byte {machine.at}") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the pickle is damaged before byte {machine.at}: {error!r}") from None
    _check_size(result, {}, _MOST_REPEATED * len(data) + 1000)
    return result


class _Machine:
    """A stack, a memo, and a place in the pickle."""

    def __init__(
        self,
        data: bytes | bytearray,
        known: Callable[[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data, self.known, self.persistent = data, known, persistent
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, instructions = self.data, _INSTRUCTIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            instruction = instructions.get(code)
            if instruction is None:
                raise ValueError(f"byte {self.at - 1} of the pickle is no instruction that data needs")
            instruction(self)

    def take(self, number: int) -> bytes:
        """The next bytes."""
        start, self.at = self.at, self.at + number
        if self.at > len(self.data):
            raise IndexError
        return bytes(self.data[start : self.at])

    def number(self, layout: struct.Struct) -> Any:
        """The next number."""
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def line(self) -> str:
        """The rest of a line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list[Any]:
        """What has been put on the stack since the last mark, taken off."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, number: int) -> tuple[Any, ...]:
        """The last entries of the stack, taken off."""
        if number > len(self.stack):
            raise IndexError
        items = tuple(self.stack[len(self.stack) - number :])
        del self.stack[len(self.stack) - number :]
        return items


def _pushes(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _text(layout: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda machine: machine.take(machine.number(layout)).decode())


def _bytes(layout: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda machine: machine.take(machine.number(layout)))


def _integer(layout: struct.Struct) -> Callable[[_Machine], None]:
    """An integer of any length, whose number of bytes comes first."""
    return _pushes(lambda m: int.from_bytes(m.take(m.number(layout)), "little", signed=True))


def _remembers(key: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine.memo[key(machine)] = machine.stack[-1]

    return instruction


def _recalls(layout: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda machine: machine.memo[machine.number(layout)])


def _skips(number: int) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine.take(number)

    return instruction


def _byte(machine: _Machine) -> int:
    machine.at += 1
    return machine.data[machine.at - 1]


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _recall(machine: _Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.at]])
    machine.at += 1


def _put_mark(machine: _Machine) -> None:
    machine.marks.append(len(machine.stack))


def _append(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise TypeError(type(target).__name__)
    target.extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict:
        raise TypeError(type(target).__name__)
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[_checked_key(key)] = value


def _checked_key(key: Any) -> Any:
    """A key that is hashed in a bounded time: nested tuples that share parts are not."""
    if type(key) not in _KEYS and not isinstance(key, PickledObject):
        raise ValueError(f"a key is {type(key).__name__}, no name or number")
    if type(key) is int and not -MAX_SIZE <= key <= MAX_SIZE:
        raise ValueError("a key is an integer of more than 64 bits")
    return key


def _call(machine: _Machine) -> Any:
    named, arguments = machine.last(2)
    if not isinstance(named, Named) or type(arguments) is not tuple:
        raise TypeError(f"{type(named).__name__} is called")
    return named.make(*arguments)


def _build(machine: _Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, PickledObject):
        target.set_state(state)
    elif type(target) is not dict:  # a state dict has versions of modules as attributes, which are not data
        raise TypeError(f"{type(target).__name__} has attributes")


def _refer(machine: _Machine) -> Any:
    reference = machine.stack.pop()
    if machine.persistent is None:
        raise TypeError("something outside of the pickle is named")
    return machine.persistent(reference)


def _name_on_stack(machine: _Machine) -> Any:
    module, name = machine.last(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name is no text")
    return machine.known(module, name)


_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _skips(1),  # the protocol
    0x95: _skips(8),  # the length of what follows, which is of use for streams
    _MARK: _put_mark,
    **{
        ord(code): _pushes(value)
        for code, value in {
            "N": lambda _: None,
            "J": lambda machine: machine.number(_I32),
            "K": _byte,
            "M": lambda machine: machine.number(_U16),
            "G": lambda machine: machine.number(_DOUBLE),
            ")": lambda _: (),
            "]": lambda _: [],
            "}": lambda _: {},
            "t": lambda machine: tuple(machine.since_mark()),
            "R": _call,
            "Q": _refer,
            "c": lambda machine: machine.known(machine.line(), machine.line()),
        }.items()
    },
    0x88: _pushes(lambda _: True),
    0x89: _pushes(lambda _: False),
    0x8A: _integer(_U8),
    0x8B: _integer(_U32),
    ord("X"): _text(_U32),
    0x8C: _text(_U8),
    0x8D: _text(_U64),
    ord("B"): _bytes(_U32),
    ord("C"): _bytes(_U8),
    0x8E: _bytes(_U64),
    0x85: _pushes(lambda machine: machine.last(1)),
    0x86: _pushes(lambda machine: machine.last(2)),
    0x87: _pushes(lambda machine: machine.last(3)),
    ord("a"): lambda machine: _append(machine, [machine.stack.pop()]),
    ord("e"): lambda machine: _append(machine, machine.since_mark()),
    ord("s"): lambda machine: _set_items(machine, list(machine.last(2))),
    ord("u"): lambda machine: _set_items(machine, machine.since_mark()),
    0x81: _pushes(_call),
    0x93: _pushes(_name_on_stack),
    ord("b"): _build,
    ord("q"): _remembers(lambda machine: machine.number(_U8)),
    ord("r"): _remembers(lambda machine: machine.number(_U32)),
    0x94: _memoize,
    ord("h"): _recall,
    ord("j"): _recalls(_U32),
}


def _check_size(value: Any, sizes: dict[int, int], most: int, depth: int = 0) -> int:
    """Number of parts of a value, those named twice counted twice; ``sizes`` has what is known, by identity.

    Raises:
        ValueError: If there are more than ``most``, if they are nested too deeply, or a part contains itself.
    """
    known = sizes.get(id(value))
    if known is not None:
        if not known:
            raise ValueError("the pickle has a part that contains itself")
        return known
    if depth > _MOST_DEEP:
        raise ValueError(f"the pickle is nested deeper than {_MOST_DEEP} levels")
    sizes[id(value)] = 0  # it is open
    total = 1
    for part in _parts(value):
        total += 1 if type(part) in _KEYS else _check_size(part, sizes, most, depth + 1)
    if total > most:
        raise ValueError("the pickle repeats its parts so often that it would be far larger than its file")
    sizes[id(value)] = total
    return total


def _parts(value: Any) -> Iterable[Any]:
    """What a value contains; keys of dicts are no containers."""
    if isinstance(value, PickledObject):
        return value.fields.values()
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple) else ()
