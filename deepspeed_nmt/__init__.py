"""A DeepSpeed-scaled trainer for translation models deeper than ordinary decoders survive."""

__version__ = "0.1.0"
