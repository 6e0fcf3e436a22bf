"""Names of pages: portable between engines that share a secret, and different wherever anything differs."""

import hashlib
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.block_hash import BlockHasher, ImageSpan, Scope
from tests.cache_manager.books import SETTINGS
from tests.cache_manager.device import Prefixes
from tests.cache_manager.play import scopes

SECRET, MODEL = b"sixteen bytes or", b"model"
TOKENS = [7, 0, 2**31 - 1, 3, 3, 9]
SHARED = Scope()
SCOPES = scopes(page_size=2)


def chain(tokens, scope=SHARED, secret=SECRET, model=MODEL, page_size=2):
    made = BlockHasher(secret, model, page_size).chain(scope)
    made.extend(np.array(tokens, np.int32))
    return made


def names(tokens, scope=SHARED, **hasher):
    return chain(tokens, scope, **hasher).hashes


def long(number: int) -> bytes:
    return number.to_bytes(8, "little")


def field(content: bytes) -> bytes:
    return long(len(content)) + content


def plain_names(tokens, scope, secret, model, size):
    """The same, as straightforward as can be."""
    key = hashlib.blake2b(field(secret) + field(model) + field(long(size)), digest_size=32).digest()
    public = 0 if scope.salt or scope.bidirectional else scope.public // size
    found, parent = [], bytes(32)
    for page in range(len(tokens) // size):
        start, end = page * size, (page + 1) * size
        content = b"".join(token.to_bytes(4, "little") for token in tokens[start:end])
        if page == 0 and public:
            content += b"\0public"
        if page == public:
            content += field(b"") + field(scope.tenant.encode()) + field(scope.salt.encode())
        if page == 0 and scope.bidirectional:
            whole = field(b"".join(token.to_bytes(4, "little") for token in tokens[: scope.bidirectional]))
            for image in scope.images:
                whole += field(f"{image.start} {image.end} ".encode() + image.digest)
            content += field(b"whole") + field(hashlib.blake2b(whole, digest_size=32).digest())
        for image in scope.images:
            if image.start < end and image.end > start:
                content += field(b"image") + field(f"{image.start} {image.end}".encode()) + field(image.digest)
        parent = hashlib.blake2b(parent + content, key=key, digest_size=32).digest()
        found.append(parent)
    return found


@SETTINGS
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=7, max_size=40),
    scope=st.sampled_from(SCOPES),
    page_size=st.sampled_from((1, 2, 7)),
)
def test_names_are_those_of_a_plain_implementation(tokens, scope, page_size):
    assert names(tokens, scope, page_size=page_size) == plain_names(tokens, scope, SECRET, MODEL, page_size)


GOLDEN = {
    Scope(): "fe337c256419582ab185307d7e2e3327a2d0f0e6598d0e565d64f79d3807e8e1",
    Scope("other", "salt"): "5822f532656e2638cf80ff256e40bf51d7d40d02623347e0d223880d4a368b15",
    Scope(public=2): "193c37d63bd60e04075da8963f3fb3856d5a4382e830b9f58820a01cf5faf524",
    Scope(bidirectional=3): "00852fd79ca4f1ae09efeb680f3368896037d6c58c34af92aa1882b0a54bb750",
    Scope(images=(ImageSpan(1, 3, b"cat"),)): "f7ddab12c0c55119d7e8f7a8db1619171ce6881d457885260acc2cdcf21c0f3c",
}


@pytest.mark.parametrize("scope", GOLDEN)
def test_names_stay_as_they_are(scope):
    """Engines of different versions, and caches on disk, share pages by these."""
    assert names(TOKENS, scope)[-1].hex() == GOLDEN[scope]


@SETTINGS
@given(
    tokens=st.lists(st.integers(0, 3), min_size=4, max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    scope=st.sampled_from(SCOPES),
)
def test_a_chain_made_bit_by_bit_is_the_one_made_at_once(tokens, cuts, scope):
    made = BlockHasher(SECRET, MODEL, 2).chain(scope)
    for end in sorted({min(max(cut, scope.bidirectional), len(tokens)) for cut in cuts} | {len(tokens)}):
        if end - 2 * len(made.hashes) >= 2:
            made.extend(np.array(tokens[2 * len(made.hashes) : end], np.int32))
    assert made.hashes == names(tokens, scope)
    assert made.contents == chain(tokens, scope).contents


def test_a_copy_goes_its_own_way():
    one = chain([1, 2])
    other = one.copy()
    one.extend(np.array([3, 4], np.int32))
    other.extend(np.array([5, 6], np.int32))
    assert one.hashes == names([1, 2, 3, 4])
    assert other.hashes == names([1, 2, 5, 6])


@pytest.mark.parametrize("changed", [{"secret": b"another secret of"}, {"model": b"another"}, {"page_size": 3}])
def test_secret_model_and_page_size_change_every_name(changed):
    assert set(names(TOKENS)).isdisjoint(names(TOKENS, **changed))
    assert set(names([0] * 12)).isdisjoint(names([0] * 12, **changed))


def test_every_scope_has_names_of_its_own():
    different = [scope for i, scope in enumerate(SCOPES) if scope not in SCOPES[:i]]
    for one, other in combinations(different, 2):
        assert names(TOKENS, one)[-1] != names(TOKENS, other)[-1], f"{one} and {other} share a name"


def test_a_page_of_the_same_tokens_has_another_name_after_other_tokens():
    one, other = names([1, 1, 5, 5]), names([2, 2, 5, 5])
    assert one[1] != other[1]
    assert len(set(names([0] * 20))) == 10


@SETTINGS
@given(
    one=st.lists(st.integers(0, 1), min_size=4, max_size=9),
    other=st.lists(st.integers(0, 1), min_size=4, max_size=9),
    scope=st.sampled_from(SCOPES),
    against=st.sampled_from(SCOPES),
)
def test_names_are_equal_exactly_where_pages_may_be_shared(one, other, scope, against):
    """By the definition that the world's device keeps of what a page depends on, and of who may see it."""
    prefixes, numbers = Prefixes(), ([], [])
    prefixes.extend(numbers[0], one, scope, 2)
    prefixes.extend(numbers[1], other, against, 2)
    for page, (a, b) in enumerate(zip(names(one, scope), names(other, against), strict=False)):
        assert (a == b) == (numbers[0][2 * page + 1] == numbers[1][2 * page + 1])


def test_tenants_meet_in_public_pages_alone():
    here, there = names(TOKENS, Scope("a", public=5)), names(TOKENS, Scope("b", public=5))
    assert here[:2] == there[:2]
    assert here[2] != there[2]
    salted = names(TOKENS, Scope("a", "salt", public=5))
    assert set(salted).isdisjoint(here)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Scope("a", "bc"), Scope("ab", "c")),
        (Scope("", "public"), Scope("public", "")),
        (Scope("\0public"), Scope(public=6)),
    ],
)
def test_names_of_tenants_cannot_be_made_to_meet(one, other):
    assert set(names(TOKENS, one)).isdisjoint(names(TOKENS, other))


def test_an_image_marks_the_pages_that_show_it_and_all_after():
    cat, dog = (names([0] * 8, Scope(images=(ImageSpan(3, 5, digest),))) for digest in (b"cat", b"dog"))
    assert cat[0] == dog[0] == names([0] * 8)[0]
    assert set(cat[1:]).isdisjoint(dog[1:])


def test_a_span_that_hits_whole_names_its_first_page_by_all_of_it():
    one, other = names([0, 0, 0, 1, 5, 5], Scope(bidirectional=4)), names([0, 0, 0, 2, 5, 5], Scope(bidirectional=4))
    assert one[0] != other[0]
    assert names([0, 0, 0, 1], Scope(bidirectional=2))[0] == names([0, 0, 0, 2], Scope(bidirectional=2))[0]


@pytest.mark.parametrize("length", [0, 15])
def test_a_short_secret_is_refused(length):
    with pytest.raises(ValueError, match=f"has {length} bytes, must have at least 16"):
        BlockHasher(bytes(length), MODEL, 2)
