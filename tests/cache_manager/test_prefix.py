"""The prefix index: a trie of names, each hit confirmed."""

import numpy as np

from cache_manager.block_hash import BlockHasher
from cache_manager.prefix import NONE, PrefixIndex
from tests.cache_manager.sequences import SECRET

NAMER = BlockHasher(SECRET, b"model", page_size=1)


def chain(*tokens):
    made = NAMER.chain()
    made.extend(np.array(tokens, np.int32))
    return made


def pages(*numbers):
    return np.array([numbers], np.int32)


def filled():
    """1 2 3 in pages 0 1 2, and 1 2 4 in pages 0 1 3."""
    index = PrefixIndex(groups=1, pages=8)
    nodes = index.add(NONE, chain(1, 2, 3), 0, pages(0, 1, 2), now=5.0)
    nodes += index.add(nodes[1], chain(1, 2, 4), 2, pages(3), now=6.0)
    return index, nodes


def test_the_longest_prefix_is_found_and_no_more_than_was_asked_for():
    index, nodes = filled()
    assert index.find(chain(1, 2, 4, 9), 4) == [nodes[0], nodes[1], nodes[3]]
    assert index.find(chain(1, 2, 3), 2) == nodes[:2]
    assert index.find(chain(2, 3), 2) == index.find(chain(1), 0) == []
    assert len(index) == 4


def test_nodes_know_their_parents_children_pages_and_births():
    index, nodes = filled()
    assert [index.parent[node] for node in nodes] == [NONE, nodes[0], nodes[1], nodes[1]]
    assert [int(index.children[node]) for node in nodes] == [1, 2, 0, 0]
    assert [float(index.born[node]) for node in nodes] == [5.0, 5.0, 5.0, 6.0]
    assert index.node_of.tolist() == [*nodes, NONE, NONE, NONE, NONE]


def test_a_child_is_known_unknown_or_somebody_elses():
    index, nodes = filled()
    assert index.child(nodes[1], chain(1, 2, 4), 2) == nodes[3]
    assert index.child(nodes[1], chain(1, 2, 5), 2) == NONE
    impostor = chain(1, 2, 5)
    impostor.hashes[2] = chain(1, 2, 4).hashes[2]
    assert index.child(nodes[1], impostor, 2) is None
    assert index.child(nodes[0], chain(1, 2, 4), 2) is None, "it comes after another node"


def test_a_hit_ends_where_a_name_stands_for_something_else():
    index, nodes = filled()
    impostor = chain(1, 7, 3)
    impostor.hashes[:] = chain(1, 2, 3).hashes
    assert index.find(impostor, 3) == nodes[:1]
    other = chain(9, 2, 3)
    other.hashes[:] = [chain(1, 2, 3).hashes[1], *chain(1, 2, 3).hashes[1:]]
    assert index.find(other, 3) == []


def test_a_block_hash_is_taken_once():
    index, nodes = filled()
    new = chain(5, 6, 7, 8)
    new.hashes[3] = new.hashes[0]
    new.hashes[1] = chain(1).hashes[0]
    assert len(index.add(NONE, new, 0, pages(4, 5, 6, 7), now=7.0)) == 1, "the second hash is another node's"
    assert index.node_of.tolist() == [*nodes, index.find(new, 1)[0], NONE, NONE, NONE]
    assert not any(name in index for name in new.hashes[2:3])
    again = chain(9, 6, 7, 8)
    again.hashes[2] = again.hashes[0]
    added = index.add(NONE, again, 0, pages(5, 6, 7, NONE)[:, :3], now=7.0)
    assert len(added) == 2, "the third hash is that of the first page"
    assert index.find(again, 3) == added
    assert len(index) == len(set(index.all())) == 7


def test_a_hash_that_is_taken_takes_no_number():
    index, _ = filled()
    new = chain(5, 6, 7, 8)
    new.hashes[1] = chain(1).hashes[0]
    (first,) = index.add(NONE, new, 0, pages(4, 5, 6, 7), now=7.0)
    assert index.add(NONE, chain(6), 0, pages(5), now=7.0) == [first + 1]


def test_tails_are_removed_and_their_numbers_used_again():
    index, nodes = filled()
    assert index.remove([nodes[3]]) == chain(1, 2, 4).hashes[2:]
    assert index.remove([nodes[2], nodes[1]]) == chain(1, 2, 3).hashes[:0:-1]
    assert index.find(chain(1, 2, 3), 3) == nodes[:1]
    assert index.node_of.tolist() == [nodes[0], *[NONE] * 7]
    assert int(index.children[nodes[0]]) == 0
    again = index.add(nodes[0], chain(1, 9, 8, 7), 1, pages(4, 5, 6), now=7.0)
    assert set(again) == set(nodes[1:])
    assert index.find(chain(1, 9, 8, 7), 4) == [nodes[0], *again]


def test_what_comes_after_is_listed_children_first():
    index, nodes = filled()
    order = index.under([nodes[1]])
    assert sorted(order) == sorted(nodes[1:])
    assert order[-1] == nodes[1]
    assert sorted(index.all()) == sorted(nodes)


def test_an_index_grows_with_its_nodes():
    index = PrefixIndex(groups=2, pages=2000)
    tokens = range(1000)
    numbers = np.arange(2000, dtype=np.int32).reshape(2, 1000)
    nodes = index.add(NONE, chain(*tokens), 0, numbers, now=0.0)
    assert (index.pages[:, nodes] == numbers).all()
    assert index.find(chain(*tokens), 1000) == nodes
