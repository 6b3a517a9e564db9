"""Vocabularies of two BERTs, one for each side, with their own tokenizers.

On both sides a sentence begins with [CLS] and ends with [SEP], which are BOS and EOS. [PAD], [UNK] and [MASK] keep
their meanings. Such a tokenizer normalises text irreversibly (lower case, accents, spaces around punctuation), so
references are normalised too before they are compared with translations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from deepspeed_nmt import huggingface
from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.data.tokenizer import INFO_FILE, UNKNOWN_TEXT, Tokenizer, VocabularyInfo
from deepspeed_nmt.errors import ConfigError, DataError, import_optional
from deepspeed_nmt.files import read_regular

PREFIX = "hf:"
"""Prefix of ``prepare --tokenizer``: hf:BERT, or hf:BERT,BERT for source and target."""

Special = dict[Side, dict[str, int]]


class BertTokenizer(Tokenizer):
    """The tokenizers of two BERTs: JSON of each side's, in the format of the library `tokenizers`.

    ``special`` has the special tokens by side and by name in :data:`deepspeed_nmt.huggingface.SPECIAL`.
    """

    def __init__(self, contents: dict[Side, str], special: Special) -> None:
        tokenizers = import_optional("tokenizers", "a vocabulary of BERTs", huggingface.EXTRA)
        self._contents, self._special = contents, special
        try:
            self._sides = {side: tokenizers.Tokenizer.from_str(contents[side]) for side in SIDES}
        except Exception as error:  # the library raises no exception class of its own
            raise DataError(f"the vocabulary could not be read as a tokenizer's JSON: {error}") from error
        for tokenizer in self._sides.values():
            tokenizer.encode_special_tokens = True  # "[SEP]" in a text stays text
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._numbers = {side: tokenizer.get_vocab() for side, tokenizer in self._sides.items()}
        self._pieces = {side: sorted(numbers, key=numbers.__getitem__) for side, numbers in self._numbers.items()}
        for numbers in self._numbers.values():
            if sorted(numbers.values()) != list(range(len(numbers))):
                raise DataError("a tokenizer of a BERT has tokens without text among its numbers; name another BERT")
        source, target = (Vocabulary.of_bert(len(self._pieces[side]), special[side]) for side in SIDES)
        if source.pad != target.pad:
            raise DataError(
                f"the two tokenizers have different numbers for [PAD], {source.pad} and {target.pad}; take others"
            )
        one = contents["source"] == contents["target"]
        self.vocabulary = target if one else replace(target, own_source=source)

    @classmethod
    def from_berts(cls, names: str) -> BertTokenizer:
        """Load the tokenizers of pretrained models: ``BERT`` for both sides, or ``BERT,BERT``."""
        parts = [part.strip() for part in names.split(",")]
        if len(parts) > 2 or not all(parts):
            raise ConfigError(f"--tokenizer is {PREFIX}{names}, not {PREFIX}BERT or {PREFIX}BERT,BERT")
        loaded = [huggingface.load_vocabulary(part, "--tokenizer") for part in (parts[0], parts[-1])]
        sides: dict[Side, huggingface.TokenizerFile] = dict(zip(SIDES, loaded, strict=True))
        return cls({s: of.content for s, of in sides.items()}, {s: of.special for s, of in sides.items()})

    @classmethod
    def read(cls, path: Path, info: VocabularyInfo) -> BertTokenizer:
        """Read the vocabularies of a directory; raise a DataError or an OSError if one is damaged."""
        special: Special = {"source": info.source, "target": info.target}
        if lacking := sorted({*huggingface.SPECIAL} - (info.source.keys() & info.target.keys())):
            raise DataError(f"{path / INFO_FILE} lacks the special token {lacking[0]}; restore it from a copy")
        return cls({side: read_regular(path / side_file(side)).decode() for side in SIDES}, special)

    @override
    def matches_bert(self, tokenizer_json: str, special: Mapping[str, int], side: Side) -> bool:
        import tokenizers

        theirs = tokenizers.Tokenizer.from_str(tokenizer_json)
        return self._special[side] == special and self._numbers[side] == theirs.get_vocab()

    @override
    def files(self) -> dict[str, bytes]:
        info = {"kind": "bert", "source": self._special["source"], "target": self._special["target"]}
        texts = {side_file(side): content for side, content in self._contents.items()}
        texts[INFO_FILE] = json.dumps(info, indent=2) + "\n"
        return {name: text.encode() for name, text in texts.items()}

    @override
    def encode_batch(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        # A source begins with [CLS]. The library decides on threads.
        encodings = self._sides[side].encode_batch(list(texts), add_special_tokens=False)
        tokens = [list(encoding.ids) for encoding in encodings]
        if side == "target":
            return tokens
        begin = self.vocabulary.source.bos
        return [[begin, *sentence] if sentence else [] for sentence in tokens]

    @override
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        vocabulary = self.vocabulary.source if side == "source" else self.vocabulary
        silent = {vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.mask}
        numbers = [int(token) for token in tokens if int(token) not in silent]
        pieces = [UNKNOWN_TEXT if number == vocabulary.unk else self._pieces[side][number] for number in numbers]
        return self._joined(pieces, side)

    def reference(self, text: str) -> str:
        """Normalise a reference as the tokenizer does: lower case and accents, and spaces between its words."""
        target = self._sides["target"]
        normal = text if target.normalizer is None else target.normalizer.normalize_str(text)
        if target.pre_tokenizer is None:
            return normal
        return self._joined([word for word, _ in target.pre_tokenizer.pre_tokenize_str(normal)], "target")

    def _joined(self, pieces: list[str], side: Side) -> str:
        if pieces:
            pieces = [pieces[0].removeprefix("##"), *pieces[1:]]
        decoder = self._sides[side].decoder
        text: str = " ".join(pieces) if decoder is None else decoder.decode(pieces)
        return text.replace(" ' ", "'")


def side_file(side: Side) -> str:
    """Return the name of the file with the vocabulary of a side."""
    return f"vocabulary.{side}.json"
