"""Snapshots of a scheduler: its state as JSON, and a scheduler that goes on from it.

A snapshot has all objects that the scheduler refers to, as a flat table: each entry is a kind and its values. A value
is a number, a text, true, false or null as in JSON, or [i] for entry i. Objects are of classes of this package and of
`cache_manager`; restoring sets their attributes and runs no code of theirs, so a snapshot from elsewhere can decide
nothing but plans. The hasher of the pages is no part of it, as it has a secret.

A snapshot fits one version of these classes: `restored` refuses one whose objects have other attributes.
"""

import base64
import math
import sys
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MethodType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHasher
from scheduler.scheduler import Scheduler

PACKAGES = ("cache_manager.", "scheduler.")
MOST_BYTES = 2**32  # of all arrays of a snapshot; pages that requests came with take up to 2**30
MOST_MEMBERS = 2**20  # of a tuple, with those of the tuples in it: a hash goes through all
PLAIN = (type(None), bool, int, float, str)
SEQUENCES: dict[str, type] = {"list": list, "set": set}
PAIRS: dict[str, type] = {"dict": dict, "Counter": Counter}
FACTORIES: dict[str, type] = {"int": int, "float": float, **SEQUENCES, **PAIRS}  # of a defaultdict
MADE_OF_OTHERS = ("tuple", "named", "frozenset", "method", "view")
UNHASHED = ("set", *PAIRS, "defaultdict")
"""Kinds that are filled last: the hash of an object that they have depends on its attributes."""

Entry = list[Any]


class SnapshotError(ValueError):
    """A snapshot that does not fit this version, or an object that no snapshot can have."""


def snapshot(scheduler: Scheduler) -> list[Entry]:
    """Returns a table for `json` of all objects of a scheduler, itself first. `json` writes its infinities as such.

    Raises:
        SnapshotError: An object is of no known kind.
    """
    taken = _Table()
    taken.value(scheduler)
    for entry, one in taken:
        entry += taken.values(one)
    return taken.entries


class _Table:
    """Entries of a snapshot that is being taken. Iterate it to the end: values of each add more."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._objects: list[object] = []  # of each entry; they stay alive, so that no two have one `id`
        self._places: dict[int, int] = {}

    def __iter__(self) -> Iterator[tuple[Entry, object]]:
        done = 0
        while done < len(self.entries):
            yield self.entries[done], self._objects[done]
            done += 1

    def value(self, one: object) -> Any:
        """Returns an object as a value. Adds an entry for one that has none yet."""
        if type(one) in PLAIN:
            return one
        place = self._places.setdefault(id(one), len(self.entries))
        if place == len(self.entries):
            self._objects.append(one)
            self.entries.append([])
        return [place]

    def values(self, one: object) -> Entry:
        """Returns the entry of an object."""
        kind = type(one)
        if isinstance(one, np.ndarray):
            return self._array(one)
        if isinstance(one, np.generic):
            return ["scalar", one.dtype.str, one.tobytes().hex()]
        if isinstance(one, bytes):
            return ["bytes", one.hex()]
        if isinstance(one, range):
            return ["range", one.start, one.stop, one.step]
        if isinstance(one, Enum):
            return ["enum", _name_of(kind), one.name]
        if isinstance(one, MethodType):
            return ["method", self.value(one.__self__), one.__name__]
        if isinstance(one, BlockHasher):
            return ["hasher"]
        if isinstance(one, deque):
            return ["deque", one.maxlen, *map(self.value, one)]
        if isinstance(one, defaultdict):
            made = next((name for name, factory in FACTORIES.items() if factory is one.default_factory), None)
            if made is None:
                raise SnapshotError(f"{one.default_factory} makes the values of a defaultdict")
            return ["defaultdict", made, *self._pairs(one)]
        if isinstance(one, dict) and PAIRS.get(kind.__name__) is kind:
            return [kind.__name__, *self._pairs(one)]
        if isinstance(one, list | set) and SEQUENCES.get(kind.__name__) is kind:
            return [kind.__name__, *map(self.value, one)]
        if kind in (tuple, frozenset):
            return [kind.__name__, *map(self.value, cast("Iterable[object]", one))]
        if isinstance(one, tuple):
            return ["named", _name_of(kind), *map(self.value, one)]
        return ["object", _name_of(kind), *self._pairs(_attributes(one))]

    def _pairs(self, each: Mapping[Any, Any]) -> Iterator[Any]:
        for key, value in each.items():
            yield self.value(key)
            yield self.value(value)

    def _array(self, one: NDArray) -> Entry:
        kind, shape, strides, writeable = one.dtype.str, list(one.shape), list(one.strides), bool(one.flags.writeable)
        if not (one.flags.c_contiguous or one.flags.f_contiguous or isinstance(one.base, np.ndarray)):
            raise SnapshotError("an array is neither in the order of C nor of Fortran")
        if isinstance(one.base, np.ndarray):  # what one array writes, the other reads
            offset = one.ctypes.data - one.base.ctypes.data
            return ["view", kind, shape, strides, writeable, self.value(one.base), offset]
        content = one.ravel("K").tobytes()  # as it is in memory
        return ["array", kind, shape, strides, writeable, base64.b85encode(zlib.compress(content, 1)).decode()]


def _attributes(one: object) -> dict[str, Any]:
    """Returns the attributes of an object by name, those in slots too."""
    slots = (name for kind in type(one).__mro__ for name in kind.__dict__.get("__slots__", ()))
    found = {name: getattr(one, name) for name in slots if name != "__weakref__" and hasattr(one, name)}
    return found | getattr(one, "__dict__", {})


def _name_of(kind: type) -> str:
    if not kind.__module__.startswith(PACKAGES):
        raise SnapshotError(f"an object is a {kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> Any:
    """Returns the class of a name. Raises SnapshotError for one of other packages."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules[module] if module.startswith(PACKAGES) else None
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or found.__module__ != module:
        raise SnapshotError(f"the snapshot has an object of {name!r:.80}")
    return found


def restored(entries: list[Entry], fresh: Scheduler, hasher: BlockHasher | None) -> Scheduler:
    """Returns the scheduler of a snapshot.

    Args:
        entries: As `snapshot` returned them, or from a file.
        fresh: A new scheduler of the same blueprint. Objects of a snapshot have the attributes that its objects have.
        hasher: Hashes its pages.

    Raises:
        SnapshotError: They are no snapshot of this version.
    """
    try:
        known = {entry[1]: set(entry[2::2]) for entry in snapshot(fresh) if entry[0] == "object"}
        made = _Restoring(entries, hasher, known).run()
    except SnapshotError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError, zlib.error) as error:
        raise SnapshotError(f"the snapshot is none of this version: {error!r:.200}") from None
    if type(made) is not Scheduler:
        raise SnapshotError("the snapshot has no scheduler")
    return made


class _Restoring:
    """Makes the objects of a snapshot: all without contents first, since they refer to each other."""

    def __init__(self, entries: list[Entry], hasher: BlockHasher | None, known: Mapping[str, set[str]]) -> None:
        self._entries, self._hasher, self._known = entries, hasher, known
        self._made: dict[int, Any] = {}
        self._members: dict[int, int] = {}
        self._bytes = 0

    def run(self) -> object:
        """Returns the first object."""
        for place, (kind, *values) in enumerate(self._entries):
            if kind not in MADE_OF_OTHERS:
                self._made[place] = self._shell(kind, values)
        for place in sorted(range(len(self._entries)), key=lambda place: self._entries[place][0] in UNHASHED):
            kind, *values = self._entries[place]
            self._fill(kind, self._value([place]), values)
        return self._made[0]

    def _value(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        (place,) = value
        if place not in self._made:
            self._made[place] = self._whole(*self._entries[place])
            self._count_members(place)
        return self._made[place]

    def _whole(self, kind: str, *values: Any) -> Any:
        if kind == "method":
            owner, name = self._value(values[0]), values[1]
            return MethodType(getattr(_class_of(_name_of(type(owner))), name), owner)
        if kind == "view":
            return self._view(*values)
        if kind == "named":
            return _class_of(values[0])._make(map(self._value, values[1:]))
        return (tuple if kind == "tuple" else frozenset)(map(self._value, values))

    def _count_members(self, place: int) -> None:
        values = self._entries[place][1:]
        inside = (self._members.get(value[0], 0) for value in values if isinstance(value, list) and value)
        self._members[place] = len(values) + sum(inside)
        if self._members[place] > MOST_MEMBERS:
            raise SnapshotError("the snapshot has a tuple of too many members")

    def _array(self, kind: str, shape: list[int], strides: list[int], writeable: bool, packed: str) -> NDArray:
        size = math.prod(shape) * _numbers(kind).itemsize
        self._bytes += size
        if min(shape, default=0) < 0 or self._bytes > MOST_BYTES:
            raise SnapshotError("the arrays of the snapshot are too large")
        content = bytearray(zlib.decompressobj().decompress(base64.b85decode(packed), size + 1))
        made: NDArray = np.ndarray(tuple(shape), _numbers(kind), content, 0, tuple(strides))
        if len(content) != size or not (made.flags.c_contiguous or made.flags.f_contiguous):
            raise SnapshotError("an array of the snapshot has another size than it says")
        made.flags.writeable = writeable
        return made

    def _view(
        self, kind: str, shape: list[int], strides: list[int], writeable: bool, base: list[int], offset: int
    ) -> NDArray:
        memory = self._value(base).ravel("K")
        made: NDArray = np.ndarray(tuple(shape), _numbers(kind), memory, offset, tuple(strides))
        if made.nbytes > memory.nbytes or self._entries[base[0]][0] != "array":
            raise SnapshotError("a view of the snapshot is larger than its array")
        made.flags.writeable = writeable
        return made

    def _shell(self, kind: str, values: list[Any]) -> Any:
        """Returns an object that has no contents yet, or one that is whole as it refers to no other."""
        if kind in SEQUENCES or kind in PAIRS:
            return FACTORIES[kind]()
        if kind == "deque":
            return deque(maxlen=values[0])
        if kind == "defaultdict":
            return defaultdict(FACTORIES[values[0]])
        if kind == "object":
            return object.__new__(self._checked(values[0], set(values[1::2])))
        return self._leaf(kind, values)

    def _leaf(self, kind: str, values: list[Any]) -> Any:
        if kind == "array":
            return self._array(*values)
        if kind == "scalar":
            return np.frombuffer(bytes.fromhex(values[1]), _numbers(values[0]))[0]
        if kind == "bytes":
            return bytes.fromhex(values[0])
        if kind == "range":
            return range(*values)
        if kind == "enum":
            return _class_of(values[0])[values[1]]
        if kind == "hasher" and self._hasher is not None:
            return self._hasher
        raise SnapshotError(f"an entry of the snapshot is {kind!r:.30}")

    def _checked(self, name: str, attributes: set[str]) -> type:
        """Returns a class whose objects have these attributes in this version."""
        made = _class_of(name)
        own = {one.name for one in fields(made)} if is_dataclass(made) else attributes
        if attributes != self._known.get(name, own):
            raise SnapshotError(f"the snapshot is of another version: a {made.__name__} has other attributes here")
        return made

    def _fill(self, kind: str, made: Any, values: list[Any]) -> None:
        if kind == "object":
            for name, value in self._pairs(values[1:]):
                object.__setattr__(made, name, value)  # also of a frozen one
        elif kind in SEQUENCES or kind == "deque":
            add = made.add if kind == "set" else made.append
            for value in values[1:] if kind == "deque" else values:
                add(self._value(value))
        elif kind in PAIRS or kind == "defaultdict":
            for key, value in self._pairs(values[1:] if kind == "defaultdict" else values):
                made[key] = value

    def _pairs(self, values: list[Any]) -> Iterator[tuple[Any, Any]]:
        each = map(self._value, values)
        return zip(each, each, strict=True)


def _numbers(kind: str) -> np.dtype:
    found = np.dtype(kind)
    if found.hasobject:
        raise SnapshotError(f"an array of the snapshot is of {kind!r:.30}")
    return found
