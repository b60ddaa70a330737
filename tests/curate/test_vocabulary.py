"""Vocabularies, and what a caption must hold to hold a concept: against a search word by word."""

import itertools
import random

import pytest

from atoll.base.errors import DataError
from atoll.base.text import words_of
from atoll.curate.concepts import LONGEST, Finder, Vocabulary, forms, lemmas, nouns


def hits(concepts: list[str], caption: str, match: str = "phrase") -> list[str]:
    vocabulary = Vocabulary.of_lines(concepts, "test", match)  # type: ignore[arg-type]
    return [vocabulary.concepts[number] for number in Finder(vocabulary)(caption)]


@pytest.mark.parametrize(
    ("concept", "caption", "found"),
    [
        ("tropical kingbird", "Two Tropical Kingbirds on a wire", True),
        ("hot dog", "a dog on a hot day", False),
        ("hot dog", "HOT-DOGS, please", True),
        ("kingbird", "a flock of kingbirds", True),
        ("leaf", "autumn leaves", True),
        ("man", "three men in a boat", True),
        ("cat", "a category of catalogues", False),
        ("cat", "the cat's whiskers", True),
        ("glasses", "a glass of water", True),  # as every lemmatiser has it
        ("Capital Letters", "a capital letter", True),
        ("paint", "an oil painting", False),
        ("café", "cafés and a Café", True),
        ("café", "a Cafe\u0301", True),
        ("काल", "लोहे की कील", False),  # letters alike, and not the vowels
        ("eiffel_tower", "the Eiffel Tower.", True),
        ("ель", "ЕЛЬ в лесу", True),
        ("kite (bird of prey)", "a kite in the wind", False),
        ("zyzzyva", "nothing of the kind", False),
    ],
)
def test_what_a_phrase_is_found_in(concept: str, caption: str, found: bool):
    assert (hits([concept], caption) == [concept.replace("_", " ")]) is found


def test_words_may_stand_anywhere_if_asked_for():
    assert hits(["hot dog", "dog"], "dogs on a hot day", "words") == ["hot dog", "dog"]
    assert hits(["hot dog"], "a hot day", "words") == []


def brute_force(vocabulary: Vocabulary, caption: str) -> list[int]:
    """Every concept against every place of the caption, word by word."""
    words, found = words_of(caption), []
    for number, concept in enumerate(vocabulary.concepts):
        wanted = [forms(word) for word in words_of(concept)]
        places = range(len(words) - len(wanted) + 1)
        if any(all(words[p + i] in one for i, one in enumerate(wanted)) for p in places):
            found.append(number)
    return found


def test_a_thousand_captions_as_by_brute_force():
    parts = ["red", "dogs", "dog", "hot", "house", "houses", "leaf", "leaves", "bus", "buses", "child"]
    parts += ["children", "3", "ice-cream", "cream", "ice"]
    draw = random.Random(0)
    captions = [" ".join(draw.choices(parts, k=draw.randint(0, 9))) for _ in range(1000)]
    phrases = [" ".join(pair) for pair in itertools.permutations(["dog", "house", "leaf", "child"], 2)]
    single = ["red", "dog", "hot", "bus", "leaf", "child", "3", "ice cream", "cream", "red hot dog"]
    vocabulary = Vocabulary.of_lines([*single, *phrases], "test")
    found = [*map(Finder(vocabulary), captions)]
    assert found == [brute_force(vocabulary, caption) for caption in captions]
    assert {n for one in found for n in one} == set(range(len(vocabulary)))


def test_a_vocabulary_that_is_none_is_refused():
    for lines, words in (
        ([], "no concepts"),
        (["", "   "], "no concepts"),
        (["dog", "!?"], r"line 2: '!\?' holds no letters"),
        (["hot dog", "cat", "Hot-Dog"], "line 3: 'Hot-Dog' is the concept of line 1 again"),
        (["a" * (LONGEST + 1)], "line 1: a concept of 201 characters"),
    ):
        with pytest.raises(DataError, match=words):
            Vocabulary.of_lines(lines, "concepts.txt")


def test_nouns_of_captions_in_their_singular_the_commonest_first():
    captions = ["two red dogs and a house", "a dog", "the houses of the dog", "running with 77 birds"]
    assert Vocabulary.of_captions(captions, least=2).concepts == ("dog", "house")
    every = Vocabulary.of_captions(captions, least=1)
    assert {"bird", "house", "dog"} <= set(every.concepts) and not {"and", "with", "77"} & set(every.concepts)
    for texts in (captions, []):
        with pytest.raises(DataError, match="lower --least"):
            Vocabulary.of_captions(texts, least=9)


def test_a_noun_of_nearly_all_captions_is_no_concept():
    """It distinguishes nothing, and every image would be one of it."""
    captions = [f"a letter in {face}" for face in ("serif", "mono")] * 10
    found = Vocabulary.of_captions([*captions, "a digit in mono"], least=2)
    assert found.concepts == ("mono", "serif") and "letter" in found.source
    assert Vocabulary.of_captions([*captions, *["a digit in mono"] * 6], least=2).concepts[0] == "letter"
    with pytest.raises(DataError, match="every noun stands in nearly all"):
        Vocabulary.of_captions(["a dog"] * 9, least=2)


def test_lemmas_are_singulars_of_nouns():
    assert lemmas("kingbirds") == ("kingbird",) and lemmas("painting") == ("painting",)
    assert set(lemmas("leaves")) == {"leaf", "leave"} and set(lemmas("glasses")) == {"glass", "glasses"}
    assert nouns("glasses") == ("glasses",) and nouns("dogs") == ("dog",) and nouns("of") == ()
    assert lemmas("café") == ("café",)  # the package would cut it at the accent


def test_the_hash_is_of_what_hits_depend_on():
    one = Vocabulary.of_lines(["a b", "c"], "here")
    assert one.hash == Vocabulary.of_lines(["a b", "c"], "there").hash
    others = (Vocabulary.of_lines(["c", "a b"], "here"), Vocabulary.of_lines(["a b", "c"], "here", "words"))
    assert len({one.hash, *(other.hash for other in others)}) == 3
