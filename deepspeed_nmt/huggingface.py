"""Pretrained models of `transformers`: BERTs, and translation models.

A model is named by a folder, or by its name on the Hugging Face hub; `option` is the setting that has the name, for
messages. No other file imports `transformers`, an optional package; this one imports it when a function is called.
What cannot be loaded, or is not supported, is a ConfigError.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deepspeed_nmt.errors import ConfigError, import_optional
from deepspeed_nmt.registry import problems_of

if TYPE_CHECKING:
    from torch import Tensor

EXTRA = "pip install 'transformers>=5,<6'"
"""Command that installs `transformers`, for messages."""
SPECIAL = ("pad", "cls", "sep", "unk", "mask")
"""Names of a BERT's special tokens."""
_LEAST_SHARE = 0.5
"""Share of a BERT's ``vocab_size`` that its tokenizer has at least: the rest fills the matrix up to a round size."""
_MAX_POSITIONS = 1 << 16
_MAX_VOCABULARY = 10_000_000

Width = Annotated[int, Field(ge=1, le=1 << 16)]
InnerWidth = Annotated[int, Field(ge=1, le=1 << 20)]
Layers = Annotated[int, Field(ge=1, le=1_000)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Token = Annotated[int, Field(ge=0, lt=_MAX_VOCABULARY)]
_NUMBERS = TypeAdapter(Annotated[dict[str, Token], Field(max_length=_MAX_VOCABULARY)], config=ConfigDict(strict=True))


class _ModelConfig(BaseModel):
    """A ``config.json``, of which keys that are not read are left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)
    model_type: str
    vocab_size: int = Field(ge=1, le=_MAX_VOCABULARY)
    max_position_embeddings: int = Field(ge=1, le=_MAX_POSITIONS)


class _BertConfig(_ModelConfig):
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    intermediate_size: InnerWidth
    layer_norm_eps: float = Field(gt=0.0, lt=1.0)
    hidden_act: str
    tie_word_embeddings: bool = True

    @property
    def least_weights(self) -> int:
        """Numbers in the embeddings and the matrices of the layers."""
        layers = self.num_hidden_layers * (4 * self.hidden_size + 2 * self.intermediate_size)
        return self.hidden_size * (self.vocab_size + layers)


class MarianConfig(_ModelConfig):
    """The ``config.json`` of a MarianMT model; names and meanings are those of `transformers`."""

    d_model: Width
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_ffn_dim: InnerWidth
    decoder_ffn_dim: InnerWidth
    encoder_attention_heads: Width
    decoder_attention_heads: Width
    activation_function: str
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    decoder_vocab_size: int | None = Field(default=None, ge=1, le=_MAX_VOCABULARY)
    eos_token_id: Token
    pad_token_id: Token
    decoder_start_token_id: Token
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    activation_dropout: Rate = 0.0

    @property
    def least_weights(self) -> int:
        """Numbers in one matrix of embeddings and the matrices of the layers."""
        encoder = self.encoder_layers * (4 * self.d_model + 2 * self.encoder_ffn_dim)
        decoder = self.decoder_layers * (8 * self.d_model + 2 * self.decoder_ffn_dim)
        return self.d_model * (self.vocab_size + encoder + decoder)


AnyConfig = TypeVar("AnyConfig", _BertConfig, MarianConfig)


class TokenizerFile(NamedTuple):
    """Tokenizer of a BERT: JSON in the format of `tokenizers`, numbers of special tokens by :data:`SPECIAL`, size."""

    content: str
    special: dict[str, int]
    size: int


def load_shape(name: str, option: str) -> dict[str, Any]:
    """Load the shape of a BERT, by the names of our settings."""
    config = _load_config(_BertConfig, "bert", name, option, "a BERT", "name a BERT")
    if config.hidden_act not in ("gelu", "relu"):
        raise ConfigError(f"{option}: {name} has hidden_act={config.hidden_act}; name a BERT with gelu or relu")
    if not config.tie_word_embeddings:
        raise ConfigError(f"{option}: the output matrix of {name} is not tied to its embeddings; name another BERT")
    return {
        "dim": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "ffn_dim": config.intermediate_size,
        "positions": config.max_position_embeddings,
        "norm_eps": config.layer_norm_eps,
        "activation": config.hidden_act,
    }


def load_weights(name: str, option: str) -> dict[str, Tensor]:
    """Load the weights of a BERT in fp32, by their names in BertForMaskedLM of `transformers`.

    The head is absent if the model was saved without it.
    """
    load_shape(name, option)
    weights, missing, _ = _load_weights("BertForMaskedLM", name, option, "a BERT", ("cls.",), r"bert\.encoder\.")
    return {key: weight for key, weight in weights.items() if not (missing and key.startswith("cls."))}


def load_vocabulary(name: str, option: str) -> TokenizerFile:
    """Load the tokenizer of a BERT, with all special tokens and most of the vocabulary."""
    tokenizer = _load("AutoTokenizer", name, option, "tokenizer of a BERT")
    numbers = {token: getattr(tokenizer, f"{token}_token_id", None) for token in SPECIAL}
    special = {token: int(number) for token, number in numbers.items() if number is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    lacking = [token.upper() for token in SPECIAL if token not in special]
    if backend is None or lacking or backend.get_vocab_size() <= len(SPECIAL):
        what = f"special tokens for {', '.join(lacking)}" if lacking else "a vocabulary (vocab.txt or tokenizer.json)"
        raise ConfigError(f"{option}: the tokenizer of {name} lacks {what}; name another BERT")
    size = backend.get_vocab_size()
    if (Path(name).expanduser() / "config.json").is_file():
        expected = _load_config(_BertConfig, "bert", name, option, "a BERT", "name a BERT").vocab_size
        if size < _LEAST_SHARE * expected:
            raise ConfigError(
                f"{option}: the tokenizer of {name} has {size:,} tokens, but its config.json has "
                f"vocab_size={expected:,}; restore its tokenizer.json"
            )
    return TokenizerFile(backend.to_str(), special, size)


class MarianFiles(NamedTuple):
    """A MarianMT model: weights in fp32, number of each token of source and target, SentencePiece models of both.

    ``generation`` has the settings of `generate`, unchecked.
    """

    config: MarianConfig
    generation: dict[str, Any]
    weights: dict[str, Tensor]
    numbers: dict[str, int]
    target_numbers: dict[str, int]
    models: tuple[bytes, bytes]


def load_marian(name: str, option: str) -> MarianFiles:
    """Load a MarianMT model and its tokenizer."""
    remedy = (
        "name a MarianMT model, or use the run of which it is an export (that of a pre-norm run is Pegasus, which is "
        "not imported)"
    )
    config = _load_config(MarianConfig, "marian", name, option, "a MarianMT model", remedy)
    # Positions are not saved by most programs, and then computed.
    positions = ("model.encoder.embed_positions.", "model.decoder.embed_positions.")
    # Our exports have a shared matrix also where it is not used; a model with one has it by other names, too.
    used = r"(?!model\.shared\.weight$)"
    weights, _, generation = _load_weights("MarianMTModel", name, option, "a MarianMT model", positions, used)
    tokenizer = _load("MarianTokenizer", name, option, "tokenizer of a MarianMT model")
    source, target = (Path(file).read_bytes() for file in tokenizer.spm_files)
    try:
        numbers = _NUMBERS.validate_python(dict(tokenizer.encoder))
        own = _NUMBERS.validate_python(dict(tokenizer.target_encoder)) if tokenizer.separate_vocabs else numbers
    except (ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} has a vocab.json that is no table of tokens and their numbers") from error
    return MarianFiles(config, generation, weights, numbers, own, (source, target))


def load_translation_model(directory: Path) -> Any:
    """Load a translation model from a folder, in eval mode."""
    return _load("AutoModelForSeq2SeqLM", str(directory), "--out", "weights of a translation model").eval()


def _load_config(kind: type[AnyConfig], model_type: str, name: str, option: str, what: str, remedy: str) -> AnyConfig:
    """Load the configuration of a model, which must not describe a larger one than the weights of a folder are."""
    loaded = _load("AutoConfig", name, option, f"config.json of {what}")
    if loaded.model_type != model_type:
        raise ConfigError(f"{option}: {name} has model_type={loaded.model_type}; {remedy}")
    try:
        config = kind.model_validate(loaded.to_dict())
    except ValidationError as error:
        where = f"{option}: the config.json of {name}"
        raise ConfigError(f"{where}: {problem}" for problem in problems_of(error)) from error
    folder = Path(name).expanduser()
    if folder.is_dir():
        size = sum(file.stat().st_size for ending in ("safetensors", "bin") for file in folder.glob(f"*.{ending}"))
        if size and size < config.least_weights:  # one byte is the smallest number
            raise ConfigError(
                f"{option}: the config.json of {name} describes at least {config.least_weights:,} numbers, but its "
                f"weights have {size:,} bytes; restore its files"
            )
    return config


def _load_weights(
    kind: str, name: str, option: str, what: str, optional: tuple[str, ...], own: str
) -> tuple[dict[str, Tensor], bool, dict[str, Any]]:
    """Load the weights of a model, a class of `transformers`, which is `what`, for messages.

    Weights whose names begin with `optional` may be missing. Those whose names match `own` must have a place.

    Returns:
        The weights in fp32, True if optional ones are missing, and the settings of `generate`.
    """
    import torch

    # Shapes are compared here: otherwise transformers raises an error without the name of the weight.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = _load(kind, name, option, f"weights of {what}", **options)
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith(optional)):
        raise ConfigError(f"{option}: {name} lacks the weight {missing[0]} of {what}; name another")
    for weight, there, here in sorted(info["mismatched_keys"]):
        raise ConfigError(f"{option}: {name} has {weight} as {tuple(there)}, not as {tuple(here)}; name another")
    if unexpected := sorted(key for key in info["unexpected_keys"] if re.match(own, key)):
        raise ConfigError(
            f"{option}: {name} has {len(unexpected):,} weights that its config.json has no place for, among them "
            f"{unexpected[0]}; name another, or restore its config.json"
        )
    weights: dict[str, Tensor] = {key: weight.detach().float() for key, weight in model.state_dict().items()}
    if wrong := next((key for key, weight in weights.items() if not torch.isfinite(weight).all()), None):
        raise ConfigError(
            f"{option}: the weight {wrong} of {name} has numbers that are NaN or infinite; name another"
        )
    generation = getattr(model, "generation_config", None)
    return weights, bool(info["missing_keys"]), {} if generation is None else generation.to_dict()


def _load(kind: str, name: str, option: str, what: str, **options: Any) -> Any:
    """Load an object through ``from_pretrained`` of a class of `transformers`, without its log and progress bars."""
    transformers = import_optional("transformers", option, EXTRA)
    local = Path(name).expanduser()
    # "berts/de" is a name on the hub, unless there is a folder "berts".
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or ("/" in name and local.parent.is_dir())
    if not local.is_dir() and (looks_local or local.exists()):
        raise ConfigError(f"{option}: there is no folder {name}; give a folder or a name on the Hugging Face hub")
    files = local.iterdir() if local.is_dir() else ()
    if irregular := next((file for file in files if not (file.is_file() or file.is_dir())), None):
        raise ConfigError(f"{option}: {irregular} is not a regular file; remove it, or give another folder")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # The code of a model's folder is never run, and nobody is asked whether it may.
    options |= {"trust_remote_code": False, "local_files_only": local.is_dir()}
    try:
        return getattr(transformers, kind).from_pretrained(str(local) if local.is_dir() else name, **options)
    except Exception as error:  # a damaged file can raise any error
        reason = f"a file lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        reason = reason or type(error).__name__
        raise ConfigError(f"{option}: the {what} could not be loaded from {name}: {reason}") from error
