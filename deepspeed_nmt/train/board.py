"""TensorBoard's page "Custom Scalars": the charts of a run, by category.

The layout is the same for all runs: a chart is given by regular expressions that tags must match from their
beginning, and one without values stays empty. TensorBoard shows a chart once for all runs together, and once for all
starts of a run.
"""

from __future__ import annotations

Layout = dict[str, dict[str, tuple[str, list[str]]]]

_SET = r"^valid/([^/]+/)?"
_OF_ALL_METHODS = (
    *("loss", "nll", "ppl", "grad_norm", "lr", "loss_scale"),
    *("skipped", "spikes", "rollbacks", "target_tokens"),
)
"""Values of training that every run has; the others are sums of its objective."""


def _chart(*patterns: str) -> tuple[str, list[str]]:
    return "Multiline", [f"{pattern}$" for pattern in patterns]


LAYOUT: Layout = {
    "Loss": {
        "training and validation, nats per token": _chart(r"^train/(loss|nll)", rf"{_SET}(loss|nll)"),
        "further sums of the objective": _chart(rf"^train/(?!({'|'.join(_OF_ALL_METHODS)})$)[^/]+"),
    },
    "Quality": {
        "metrics of all validation sets": _chart(rf"{_SET}(?!(loss|nll|ppl)$)[^/]+"),
        "perplexity": _chart(r"^train/ppl", rf"{_SET}ppl"),
    },
    "Collapse": {
        "source reliance, nats per token": _chart(r"^collapse/(source_reliance|nll)"),
        "share of cross-attention by layer": _chart(r"^collapse/cross_share/.*"),
    },
    "Speed": {
        "target tokens per second": _chart(r"^perf/target_tokens_per_s"),
        "MFU, data wait, padding": _chart(r"^perf/(mfu|data_wait|padding)"),
        "peak memory, GiB": _chart(r"^perf/memory"),
    },
    "Stability": {
        "norm of the gradient": _chart(r"^train/grad_norm"),
        "norm of the gradient, encoder": _chart(r"^norm/gradient/[a-z_]*encoder/.*"),
        "norm of the gradient, decoder": _chart(r"^norm/gradient/[a-z_]*decoder/.*"),
        "norm of the gradient, elsewhere": _chart(r"^norm/gradient/(?![a-z_]*coder/).*"),
        "change of the weights, encoder": _chart(r"^norm/update/[a-z_]*encoder/.*"),
        "change of the weights, decoder": _chart(r"^norm/update/[a-z_]*decoder/.*"),
        "change of the weights, elsewhere": _chart(r"^norm/update/(?![a-z_]*coder/).*"),
        "learning rate": _chart(r"^train/lr"),
        "loss scale": _chart(r"^train/loss_scale"),
        "skipped updates, spikes, rollbacks": _chart(r"^train/(skipped|spikes|rollbacks)"),
    },
    "Mixture": {
        "share of target tokens": _chart(r"^data/[^/]+/share"),
        "loss by corpus, nats per token": _chart(r"^train/[^/]+/nll"),
        "epochs by corpus": _chart(r"^data/[^/]+/epochs"),
    },
}
