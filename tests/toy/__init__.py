"""Toy methods, one of each kind: a plug-in, ``DEEPSPEED_NMT_PLUGINS=tests.toy``."""

from tests.plugin import nmt_state_norm
from tests.toy import toy_attention, toy_layer, toy_loss, toy_model, toy_optimizer, toy_search

PLUGIN_API = 1
ENTRIES = [
    module.ENTRY
    for module in (toy_model, toy_layer, toy_attention, toy_loss, toy_search, toy_optimizer, nmt_state_norm)
]
