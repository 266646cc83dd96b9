"""Schemes of tags: the same entities in each, what is not well-formed, and which scheme a file has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.tags import check_kinds, check_tag, detect_scheme, from_iob2, to_iob2
from bertkit.metrics.ner import find_entities

IOB = st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y-Z", "I-Y-Z"]), max_size=8)
ANY = st.lists(st.sampled_from(["O", *(f"{mark}-{kind}" for mark in "BIESLU" for kind in ("X", "Y-Z"))]), max_size=8)
SCHEMES = ("IOB1", "IOB2", "IOBES", "BILOU")


@pytest.mark.parametrize(
    ("iob2", "iob1", "iobes", "bilou"),
    [
        ("B-X I-X O B-X", "I-X I-X O I-X", "B-X E-X O S-X", "B-X L-X O U-X"),
        ("B-X B-X I-X I-X", "I-X B-X I-X I-X", "S-X B-X I-X E-X", "U-X B-X I-X L-X"),
        ("B-X B-Y B-Y", "I-X I-Y B-Y", "S-X S-Y S-Y", "U-X U-Y U-Y"),
        ("O", "O", "O", "O"),
    ],
)
def test_the_same_entities_in_each_scheme(iob2, iob1, iobes, bilou):
    for scheme, tags in zip(SCHEMES, (iob1, iob2, iobes, bilou), strict=True):
        assert from_iob2(iob2.split(), scheme) == tags.split()
        assert to_iob2(tags.split()) == iob2.split()
        if tags != "O":
            assert detect_scheme([tags.split()]) == (scheme, 0)


@given(ANY)
def test_entities_stay_whatever_the_tags(tags):
    expected = find_entities(tags)
    assert find_entities(to_iob2(tags)) == expected
    assert to_iob2(to_iob2(tags)) == to_iob2(tags)
    for scheme in SCHEMES:
        found = from_iob2(to_iob2(tags), scheme)
        assert find_entities(found) == expected
        assert to_iob2(found) == to_iob2(tags)


@given(IOB)
def test_tags_that_are_not_well_formed_have_the_same_entities(tags):
    for scheme in SCHEMES:
        assert find_entities(from_iob2(tags, scheme)) == find_entities(tags)
    assert from_iob2(tags, "IOB2") == tags
    assert detect_scheme([to_iob2(tags)]) == ("IOB2", 0)


def test_a_file_of_several_schemes_is_of_the_most_frequent_one():
    """A tag after an entity of its type is equal in IOB1 and IOB2 and does not count."""
    assert detect_scheme([["B-X", "I-X", "O", "B-X"], ["O", "I-X"], ["B-Y", "B-Y"]]) == ("IOB2", 1)
    assert detect_scheme([["I-X", "B-X", "B-X", "O", "I-X"], ["B-X"]]) == ("IOB1", 1)
    assert detect_scheme([["S-X", "O", "B-X", "I-X"], ["E-X"]]) == ("IOBES", 2)  # E-X ends the first, S-X is the second
    assert detect_scheme([["U-X", "U-Y", "S-X"]]) == ("BILOU", 1)


def test_labels_of_several_words_are_told_and_stay_different_in_conll_files(refused):
    lines = []
    check_kinds("here", {"", "Street_name", "Work of art", "City"}, lines.append)
    assert lines == [
        "here: CoNLL files have no spaces in labels; they are written with _, such as 'Work of art' as Work_of_art"
    ]
    with refused():
        check_kinds("here", {"Work of art", "Work of_art"}, lines.append)
    assert check_tag("B-Work of art", "here") == "B-Work of art"


def test_another_tag_is_one_line(refused):
    for tag in ("", "B-", "X", "b-per", "B- a", "M-PER"):
        with refused():
            check_tag(tag, "here")
