"""Pretrained models of `transformers`: BERTs, and translation models.

A model is named by a folder, or by its name on the Hugging Face hub. No other file imports `transformers`, an
optional package; this one imports it when a function is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_nmt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

EXTRA = "pip install 'transformers>=5,<6'"
"""Command that installs `transformers`, for messages."""
SPECIAL = ("pad", "cls", "sep", "unk", "mask")
"""Names of a BERT's special tokens."""


_HUB_TIMEOUT_S = 5.0


class TokenizerFile(NamedTuple):
    """Tokenizer of a BERT.

    Attributes:
        content: JSON of the tokenizer, in the format of `tokenizers`.
        special: numbers of the special tokens, by the names in :data:`SPECIAL`.
        size: number of tokens.
    """

    content: str
    special: dict[str, int]
    size: int


def load_shape(name: str, option: str) -> dict[str, Any]:
    """Load the shape of a BERT.

    Args:
        name: a folder, or a name on the hub.
        option: setting or option that contains the name, for messages.

    Returns:
        A mapping with the keys dim, layers, heads, ffn_dim, positions, norm_eps and activation.

    Raises:
        ConfigError: if the model cannot be loaded, is not a BERT, or is of a kind that is not supported.
    """
    config = _load("AutoConfig", name, option, "config.json of a BERT")
    if config.model_type != "bert":
        raise ConfigError(f"{option}: {name} has model_type={config.model_type}; name a BERT")
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
    """Load the weights of a BERT.

    Args:
        name: a folder, or a name on the hub.
        option: setting or option that contains the name, for messages.

    Returns:
        The weights in fp32, by their names in BertForMaskedLM of `transformers`. The head is absent if the model was
        saved without it.

    Raises:
        ConfigError: if the weights cannot be loaded, or some are missing.
    """
    load_shape(name, option)
    model, info = _load("BertForMaskedLM", name, option, "weights of a BERT", output_loading_info=True)
    missing = {key for key in info["missing_keys"] if not key.startswith("cls.")}
    if missing or info["mismatched_keys"]:
        first = sorted(missing)[0] if missing else str(sorted(info["mismatched_keys"])[0])
        raise ConfigError(f"{option}: {name} lacks the weight {first} of a BERT; name another")
    weights: dict[str, Tensor] = model.float().state_dict()
    return {key: weight for key, weight in weights.items() if not (info["missing_keys"] and key.startswith("cls."))}


def load_vocabulary(name: str, option: str) -> TokenizerFile:
    """Load the tokenizer of a BERT.

    Args:
        name: a folder, or a name on the hub.
        option: setting or option that contains the name, for messages.

    Raises:
        ConfigError: if the tokenizer cannot be loaded, or lacks a special token or a vocabulary.
    """
    tokenizer = _load("AutoTokenizer", name, option, "tokenizer of a BERT")
    numbers = {token: getattr(tokenizer, f"{token}_token_id", None) for token in SPECIAL}
    special = {token: int(number) for token, number in numbers.items() if number is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    lacking = [token.upper() for token in SPECIAL if token not in special]
    if backend is None or lacking or backend.get_vocab_size() <= len(SPECIAL):
        what = f"special tokens for {', '.join(lacking)}" if lacking else "a vocabulary (vocab.txt or tokenizer.json)"
        raise ConfigError(f"{option}: the tokenizer of {name} lacks {what}; name another BERT")
    return TokenizerFile(backend.to_str(), special, backend.get_vocab_size())


class MarianFiles(NamedTuple):
    """A MarianMT model.

    Attributes:
        config: its configuration.
        weights: fp32, by their names there, shared ones under each name.
        numbers: number of each token; of the source's tokens if the target has its own.
        target_numbers: number of each token of the target.
        models: SentencePiece models of source and target.
        special: tokens <unk>, </s> and <pad>.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    numbers: dict[str, int]
    target_numbers: dict[str, int]
    models: tuple[bytes, bytes]
    special: dict[str, int]


def load_marian(name: str, option: str) -> MarianFiles:
    """Load a MarianMT model and its tokenizer.

    Args:
        name: a folder, or a name on the hub.
        option: option that contains the name, for messages.

    Raises:
        ConfigError: if it cannot be loaded, or is no MarianMT model.
    """
    config = _load("AutoConfig", name, option, "config.json of a MarianMT model")
    if config.model_type != "marian":
        raise ConfigError(
            f"{name} has model_type={config.model_type}; name a MarianMT model, or use the run of which it is an "
            "export (that of a pre-norm run is Pegasus, which is not imported)"
        )
    model, info = _load("MarianMTModel", name, option, "weights of a MarianMT model", output_loading_info=True)
    # Positions are not saved by most programs, and then computed.
    if missing := sorted(key for key in info["missing_keys"] if "embed_positions" not in key):
        raise ConfigError(f"{name} lacks the weight {missing[0]} of a MarianMT model")
    tokenizer = _load("MarianTokenizer", name, option, "tokenizer of a MarianMT model")
    source, target = (Path(file).read_bytes() for file in tokenizer.spm_files)
    numbers = dict(tokenizer.encoder)
    return MarianFiles(
        config=config.to_dict(),
        weights={key: weight.detach().float() for key, weight in model.state_dict().items()},
        numbers=numbers,
        target_numbers=dict(tokenizer.target_encoder) if tokenizer.separate_vocabs else numbers,
        models=(source, target),
        special={key: int(getattr(config, f"{key}_token_id")) for key in ("eos", "pad", "decoder_start")},
    )


def load_translation_model(directory: Path) -> Any:
    """Load a translation model from a folder, in eval mode.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    return _load("AutoModelForSeq2SeqLM", str(directory), "--out", "weights of a translation model").eval()


def _load(kind: str, name: str, option: str, what: str, **options: Any) -> Any:
    """Load an object through ``from_pretrained`` of a class of `transformers`, without its log and progress bars.

    Args:
        kind: name of the class.
        name: a folder, or a name on the hub.
        option: setting or option that contains the name, for messages.
        what: content that is loaded, for messages.
        options: further arguments of ``from_pretrained``.

    Raises:
        ConfigError: if `transformers` is not installed, or the object cannot be loaded.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"the package transformers, which {option} needs, is not installed; install it ({EXTRA})"
        ) from error
    local = Path(name).expanduser()
    # "berts/de" is a name on the hub, unless there is a folder "berts".
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or ("/" in name and local.parent.is_dir())
    if not local.is_dir() and (looks_local or local.exists()):
        raise ConfigError(f"{option}: there is no folder {name}; give a folder or a name on the Hugging Face hub")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load: Callable[..., Any] = getattr(transformers, kind).from_pretrained
    unreachable = "" if local.is_dir() else _hub_problem(name)
    try:
        if local.is_dir():
            return load(str(local), local_files_only=True, **options)
        return load(name, local_files_only=bool(unreachable), **options)
    except Exception as error:  # a damaged file can raise any error
        reason = " ".join(str(error).split())[:300]
        if unreachable:
            reason = (
                f"the hub cannot be reached ({unreachable}), and its cache on this machine lacks it; give a folder"
            )
        raise ConfigError(
            f"{option}: the {what} could not be loaded from {name}: {reason or type(error).__name__}"
        ) from error


@functools.cache
def _hub_problem(name: str) -> str:
    """Return the reason why the hub cannot be asked for a model, after seconds; "" if it answers.

    Without this, `transformers` would retry for a minute, and wait for each file of a model in the hub's cache.
    """
    import huggingface_hub

    try:
        url = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
    except huggingface_hub.errors.HFValidationError:
        return ""  # `transformers` says what is wrong with the name
    except huggingface_hub.errors.HfHubHTTPError as error:
        return "" if error.response.status_code < 500 else f"status {error.response.status_code}"
    except Exception as error:  # of the HTTP library, or of the hub's offline mode
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""
