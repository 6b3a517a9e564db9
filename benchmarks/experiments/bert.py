"""Experiment: benefit of pretrained BERTs by decoder. Arms share data, seed and number of updates.

    python benchmarks/run.py bert --text TEXT --data DATA --out OUT [--jobs J ...] [--at-once 2]

TEXT is a directory with train, val and test_2016_flickr in .de and .en (raw Multi30k); the direction is German to
English. First, two small BERTs are pretrained on the two sides of the training text by masked-token prediction, with
WordPiece vocabularies, and saved by `transformers` (OUT/berts); BERTs that are there already are used. Then DATA is
prepared with their tokenizers, and each arm is trained, averaged and translated as in the other experiments.
References are normalised like translations (lower case, spaces of BERT's tokenizer), so scores are comparable only
among the arms. Requires `transformers`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arms import Arm, Experiment, add_options, sh
from records import Results

from deepspeed_nmt.data.data_directory import DataDirectory

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY, DIM, LAYERS, HEADS, POSITIONS = 3000, 64, 4, 4, 128
BATCH, UPDATES, LR = 128, 4000, 2e-3
MASKED = 0.15

COMMON = [
    *("engine.name=plain", "engine.device=cpu", "batch.update_tokens=2048", "batch.micro_tokens=2048"),
    *("training.keep_last=4", "training.validate_every=250", "training.log_every=50", "collapse.every=0"),
    *("validation.max_sentences=200", "optimizer.lr=2e-3", "schedule.warmup_updates=400"),
]
ARMS = {
    **{
        name: Arm([], recipe=f"bert_{name}")
        for name in ("scratch_transformer", "init_transformer", "serial", "parallel", "parallel_frozen")
    },
    "coordinator": Arm([f"model.coordinator_layers={LAYERS}"], recipe="bert_coordinator"),
    "abnet_serial": Arm(["model.adapter_dim=128"], recipe="abnet_serial"),
    "abnet_parallel": Arm(["model.adapter_dim=128"], recipe="abnet_parallel"),
    # The factor of the parallel decoder's sums, which is 1 in the paper.
    **{
        f"{name}_{label}": Arm([f"model.fusion_scale={scale}"], recipe=f"bert_{name}")
        for name in ("parallel", "parallel_frozen")
        for label, scale in (("half", "0.5"), ("learned", "learned"))
    },
    # Embeddings are trained; in the paper they are frozen.
    **{
        f"{name}_thawed": Arm(["model.freeze=[]"], recipe=f"bert_{name}")
        for name in ("init_transformer", "serial", "parallel")
    },
}
JOBS = [f"{name}:1" for name in ARMS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, JOBS)
    parser.add_argument("--text", type=Path, required=True, help="directory of the raw text")


def run(arguments: argparse.Namespace) -> Results:
    """Pretrain BERTs, prepare the data, then run the arms."""
    berts = {side: arguments.out / "berts" / side for side in ("de", "en")}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda side: _pretrained(arguments.text / f"train.{side}", berts[side]), berts))
    words = ["prepare", "--out", str(arguments.data), "--tokenizer", f"hf:{berts['de']},{berts['en']}"]
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        files = {"source": arguments.text / f"{name}.de", "target": arguments.text / f"{name}.en"}
        words += [word for side, file in files.items() for word in (f"--{split}-{side}", str(file))]
    sys.stdout.write(sh(*words))
    tokenizer = DataDirectory.open(arguments.data).tokenizer()
    reference = arguments.out / "test.reference"
    lines = (arguments.data / "test.target").read_text(encoding="utf-8").splitlines()
    reference.write_text("".join(tokenizer.reference(line) + "\n" for line in lines), encoding="utf-8")
    named = [f"model.source_encoder={berts['de']}", f"model.target_encoder={berts['en']}"]
    return Experiment(ARMS, arguments, [*COMMON, *named], reference).run(arguments.jobs)


def _pretrained(text: Path, bert: Path) -> None:
    if not (bert / "losses.json").exists():  # written last
        subprocess.run([sys.executable, __file__, str(text), str(bert)], check=True)


def pretrain(text: Path, bert: Path) -> None:
    """Pretrain a BERT on one side of the training text, on one thread."""
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(1)
    lines = text.read_text(encoding="utf-8").splitlines()
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    words.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    words.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    words.train_from_iterator(lines, trainer)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * DIM,
        max_position_embeddings=POSITIONS,
    )
    model = transformers.BertForMaskedLM(config).train()
    sentences = [[2, *encoding.ids[: POSITIONS - 2], 3] for encoding in words.encode_batch(lines)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, UPDATES, pct_start=0.1)
    losses = []
    for update, rows in enumerate(_batches(sentences), start=1):
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        chosen = (torch.rand(tokens.shape) < MASKED) & (tokens >= len(SPECIAL))
        # Devlin et al. (2019): 80% of the chosen tokens become [MASK], 10% a random token, 10% stay.
        dice = torch.rand(tokens.shape)
        shown = torch.where(chosen & (dice < 0.8), 4, tokens)
        other = torch.randint(len(SPECIAL), len(tokenizer), tokens.shape)
        shown = torch.where(chosen & (dice >= 0.9), other, shown)
        loss = model(shown, attention_mask=tokens.ne(0).long(), labels=tokens.masked_fill(~chosen, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if update % 500 == 0:
            sys.stdout.write(f"{text.name}: update {update}, masked-token loss {sum(losses[-500:]) / 500:.3f}\n")
            sys.stdout.flush()
    model.save_pretrained(bert)
    tokenizer.save_pretrained(bert)
    (bert / "losses.json").write_text(json.dumps(losses))


def _batches(sentences: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield random batches of sentences of similar length."""
    import torch

    for _ in range(UPDATES):
        rows = [sentences[i] for i in torch.randint(len(sentences), (8 * BATCH,)).tolist()]
        start = int(torch.randint(8, ())) * BATCH
        yield sorted(rows, key=len)[start : start + BATCH]


if __name__ == "__main__":
    pretrain(*map(Path, sys.argv[1:]))
