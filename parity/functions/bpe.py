"""Byte-pair encoding: the same merges in the same order, the same ids, the same tokens, and the text comes back."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from parity.compare import Judgement
from parity.function import Function, same
from reimpl.bpe import BYTES, ByteLevelTokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it would start threads for a dozen words


@dataclass(frozen=True)
class Corpus:
    """Texts to learn from, texts to encode, how many merges at most, and how often a pair must occur."""

    texts: tuple[str, ...]
    others: tuple[str, ...]
    merges: int
    least: int


def judge(corpus: Corpus) -> list[Judgement]:
    """Train both sides on the same texts, and encode these and others."""
    size = len(BYTES) + corpus.merges
    ours, theirs = ByteLevelTokenizer.train(corpus.texts, size, corpus.least), _trained(corpus, size)
    model = json.loads(theirs.to_str())["model"]
    texts = (*corpus.texts, *corpus.others)
    encoded = [ours.encode(text) for text in texts]
    return [
        same("merges", list(ours.encoding.merges), [tuple(pair) for pair in model["merges"]]),
        same("vocabulary", sorted(ours.encoding.vocabulary.items()), sorted(model["vocab"].items())),
        same("ids", encoded, [encoding.ids for encoding in theirs.encode_batch(texts)]),
        same("decoded text", [ours.decode(ids) for ids in encoded], list(texts)),
        same("decoded pieces", *_pieces(ours, theirs, encoded)),
    ]


def _trained(corpus: Corpus, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=corpus.least, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus.texts, trainer)
    return tokenizer


def _pieces(ours: ByteLevelTokenizer, theirs: Tokenizer, encoded: list[list[int]]) -> tuple[list[str], list[str]]:
    """What every other token says alone, where half a character may be left over."""
    parts = [ids[::2] for ids in encoded]
    return [ours.decode(part) for part in parts], [theirs.decode(part) for part in parts]


# Characters that Unicode has assigned for long: the two libraries are of different versions of it.
ANY = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=30)
FEW = st.text("ab", max_size=30) | st.text("aab 'sé\n", max_size=40)  # many ties, many overlaps
TEXTS = st.lists(FEW | ANY, max_size=6).map(tuple)

FUNCTION = Function(
    "bpe",
    "byte-pair encoding: merges in their order, ties included, vocabulary, ids, and the text again",
    "reimpl.bpe.ByteLevelTokenizer",
    "tokenizers.Tokenizer (models.BPE, pre_tokenizers.ByteLevel)",
    st.builds(Corpus, texts=TEXTS, others=TEXTS, merges=st.sampled_from((0, 1, 3, 10, 100)), least=st.integers(0, 3)),
    judge,
)
