"""Byte-pair encoding (Sennrich et al. 2016, 1508.07909, algorithm 1), on bytes as in GPT-2 (Radford et al. 2019, 2.2).

Training merges the most frequent pair of neighbouring tokens, again and again; pairs overlap when they are counted, so
`aaa` holds two of `a a`, and do not when they are merged. Implementations differ in ties. The rule here is that of the
library `tokenizers`: of several pairs with the largest count the one whose left token has the smallest id, then the one
whose right token has. Ids are given to the alphabet in the order of its code points, then to every new token as it is
made; a token that is made a second time, as `aaa` from `a aa` and from `aa a`, keeps its id.

Encoding applies the merge that was learned first, at its leftmost place, until none applies.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeAlias

import regex

Pair: TypeAlias = tuple[str, str]
Tokens: TypeAlias = list[str]


@dataclass(frozen=True)
class BytePairEncoding:
    """The tokens with their ids, and the merges in the order in which they were learned."""

    vocabulary: Mapping[str, int]
    merges: Sequence[Pair]

    @cached_property
    def ranks(self) -> dict[Pair, int]:
        """When each merge was learned."""
        return {pair: rank for rank, pair in enumerate(self.merges)}

    def encode(self, word: str) -> Tokens:
        """The tokens of a word, which does not pass the bounds of words that training saw."""
        tokens = list(word)
        while pairs := [(self.ranks[pair], at) for at, pair in enumerate(pairwise(tokens)) if pair in self.ranks]:
            _, at = min(pairs)
            tokens[at : at + 2] = ["".join(tokens[at : at + 2])]
        return tokens


def train(words: Mapping[str, int], size: int, alphabet: Iterable[str] = (), least: int = 1) -> BytePairEncoding:
    """Learn an encoding from words and how often each occurs.

    Args:
        size: of the vocabulary; less where no pair is left, more where the alphabet alone is larger.
        alphabet: characters that get an id whether they occur or not.
        least: how often a pair must occur to be merged.
    """
    vocabulary = {character: index for index, character in enumerate(sorted({*alphabet}.union(*words)))}
    merges: list[Pair] = []
    corpus = _Corpus(words, vocabulary)
    while len(vocabulary) < size and (pair := corpus.most_frequent(least)) is not None:
        vocabulary.setdefault("".join(pair), len(vocabulary))
        merges.append(pair)
        corpus.merge(pair)
    return BytePairEncoding(vocabulary, merges)


class _Corpus:
    """The words as they are cut so far, with the counts of all pairs and a queue of them, the next to merge first."""

    def __init__(self, words: Mapping[str, int], vocabulary: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary
        self.words = [list(word) for word in words]
        self.times = list(words.values())
        self.counts: Counter[Pair] = Counter()
        self.places: defaultdict[Pair, set[int]] = defaultdict(set)  # words that hold a pair, or once did
        for index in range(len(self.words)):
            self._count(index, +1)
        self.queue = [self._entry(pair) for pair in self.counts]
        heapify(self.queue)

    def most_frequent(self, least: int) -> Pair | None:
        """The pair to merge. Entries of the queue whose count has changed since are passed over."""
        while self.queue:
            count, *_, pair = heappop(self.queue)
            if -count == self.counts[pair]:
                return pair if -count >= max(least, 1) else None
        return None

    def merge(self, pair: Pair) -> None:
        """Join the pair wherever it stands, from left to right."""
        changed: set[Pair] = set()
        for index in self.places.pop(pair):
            changed |= self._count(index, -1)
            self.words[index] = list(_joined(self.words[index], pair))
            changed |= self._count(index, +1)
        for each in changed:
            heappush(self.queue, self._entry(each))

    def _count(self, index: int, sign: int) -> set[Pair]:
        pairs = list(pairwise(self.words[index]))
        for pair in pairs:
            self.counts[pair] += sign * self.times[index]
            self.places[pair].add(index)
        return set(pairs)

    def _entry(self, pair: Pair) -> tuple[int, int, int, Pair]:
        left, right = pair
        return -self.counts[pair], self.vocabulary[left], self.vocabulary[right], pair


def _joined(tokens: Tokens, pair: Pair) -> Iterator[str]:
    at = 0
    while at < len(tokens):
        width = 2 if tuple(tokens[at : at + 2]) == pair else 1
        yield "".join(tokens[at : at + width])
        at += width


WORDS = regex.compile(r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""GPT-2's words: endings after an apostrophe, letters, digits, other signs, each with a space before it, and spaces."""

PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTES: Mapping[int, str] = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(sorted({*range(256)}.difference(PRINTABLE)))
}
"""A visible character for every byte: the byte's own in Latin-1, or the next one beyond (so that a space is `Ġ`)."""


@dataclass(frozen=True)
class ByteLevelTokenizer:
    """GPT-2's tokenizer: text is cut into words, their bytes in UTF-8 are the alphabet, so nothing is unknown."""

    encoding: BytePairEncoding

    @classmethod
    def train(cls, texts: Iterable[str], size: int, least: int = 1) -> "ByteLevelTokenizer":
        """Learn an encoding of texts, with all 256 bytes in it and `size` tokens in all."""
        words = Counter(word for text in texts for word in byte_words(text))
        return cls(train(words, size, BYTES.values(), least))

    def encode(self, text: str) -> list[int]:
        """The ids of a text's tokens."""
        vocabulary = self.encoding.vocabulary
        return [vocabulary[token] for word in byte_words(text) for token in self.encoding.encode(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8, as those of half a character, become U+FFFD.

        Raises:
            ValueError: for an id beyond the vocabulary.
        """
        tokens, wanted = {index: token for token, index in self.encoding.vocabulary.items()}, list(ids)
        if unknown := [index for index in wanted if index not in tokens]:
            raise ValueError(f"id {unknown[0]} is no token: they run from 0 to {len(tokens) - 1}")
        bytes_of = {character: byte for byte, character in BYTES.items()}
        return bytes(bytes_of[each] for index in wanted for each in tokens[index]).decode("utf-8", "replace")


def byte_words(text: str) -> Iterator[str]:
    """The words of a text, each byte as its visible character."""
    for word in WORDS.findall(text):
        yield "".join(BYTES[byte] for byte in word.encode("utf-8"))
