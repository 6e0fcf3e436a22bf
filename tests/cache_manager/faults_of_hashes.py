"""Bugs to plant in the names of pages, and in the search for them."""

from contextlib import contextmanager
from dataclasses import replace

from cache_manager.block_hash import HASH_BYTES, BlockHasher, HashChain
from cache_manager.lookup import PrefixLookup
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.transfers import NO_TRANSFER
from tests.cache_manager.faults import FAULTS, Fault, fault


def short_names(real):
    """Makes hashes so short that they collide: no fault, since hits are confirmed."""

    def link(self, parent, contents):
        names = []
        for content in contents:
            parent = bytes([real(self, parent, [content])[0][0] & 1]) * HASH_BYTES
            names.append(parent)
        return names

    return link


SHORT_NAMES = Fault(BlockHasher, "link", short_names, "collisions")


@fault(PrefixIndex, "_confirmed", "collisions", (SHORT_NAMES,))
def hit_is_not_confirmed(real):
    return lambda self, found, chain: len(found)


@fault(PrefixIndex, "child", "collisions", (SHORT_NAMES,))
def page_is_published_after_another_ones(real):
    return lambda self, parent, chain, index: self._node_of_hash.get(chain.hashes[index], NONE)


@fault(PrefixIndex, "_enter_hashes", "collisions", (SHORT_NAMES,))
def name_is_given_twice(real):
    def give(self, names, nodes):
        self._node_of_hash.update(zip(names, nodes, strict=True))
        return len(nodes)

    return give


@fault(PrefixIndex, "_enter_hashes", "collisions", (SHORT_NAMES,))
def names_after_one_that_is_taken_stay(real):
    def give(self, names, nodes):
        given = real(self, names, nodes)
        for name, node in zip(names[given:], nodes[given:], strict=True):
            self._node_of_hash.setdefault(name, node)
        return given

    return give


@fault(PrefixLookup, "match")
def bound_of_a_match_is_ignored(real):
    return lambda self, chain, most, transferred=NO_TRANSFER: real(
        self, chain, most + self.layout.page_size, transferred
    )


@contextmanager
def scope_of(chain, **changes):
    scope, chain.scope = chain.scope, replace(chain.scope, **changes)
    yield
    chain.scope = scope


def names_without(**changes):
    """Chains are named as if their scope had been changed so."""

    def make(real):
        def extras(self, tokens, start, end):
            with scope_of(self, **{k: v(self.scope) if callable(v) else v for k, v in changes.items()}):
                yield from list(real(self, tokens, start, end))

        return extras

    return make


for left_out, changes in {
    "tenant_is_left_out_of_names": {"tenant": ""},
    "salt_is_left_out_of_names": {"salt": ""},
    "span_that_hits_whole_is_left_out_of_names": {"bidirectional": 0},
    "public_page_is_named_privately": {"public": 0},
    "private_page_is_named_publicly": {"public": lambda scope: scope.public * 2},
    "image_is_left_out_of_names": {"images": lambda s: tuple(replace(image, digest=b"") for image in s.images)},
}.items():
    FAULTS[left_out] = Fault(HashChain, "_extras", names_without(**changes), "play")
