"""Engines give the same losses, norms and weights; a run that is probed, stopped and restored gives the same bits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support import ROOT, run_ranks, write_mixture, write_weights

FULL = ["plain", "zero0", "zero1", "zero2", "zero3"]
SIXTEEN_BIT = ["plain:bf16", "zero1:bf16", "zero3:bf16", "zero2:fp16"]
PACKED = ["zero2+packed", "zero2:bf16+packed"]
RECOMPUTED = ["zero2+recompute", "zero3:bf16+recompute", "zero3+recompute+packed"]
WHOLE = ["plain+muon", "zero0+muon", "zero0+adafactor"]
OTHERS = ("r_drop", "adamw", "muon", "adafactor")
"""Objectives and optimizers with a reference of their own."""
# Engines of each method, by number of ranks. All are compared with one plain process.
ENGINES = {
    "vanilla": {
        1: ["plain", "zero2", "plain+packed", "plain+muon", "plain+adafactor"],
        2: [*FULL, *SIXTEEN_BIT, "offload", *PACKED, "zero3+recompute+compile+packed", *WHOLE],
        3: ["zero3"],
    },
    "deep_decoder": {
        1: ["plain", "plain+r_drop"],
        2: ["zero1", *RECOMPUTED, "zero2+r_drop", "plain+packed+r_drop"],
    },
    "exits": {1: ["plain"], 2: ["zero1+packed", "zero3+recompute"]},
    "loops": {1: ["plain"], 2: ["zero2", "zero3+recompute+packed"]},
    "growing": {1: ["plain"], 2: ["plain:fp16", "zero1:bf16", "zero2+recompute+packed"]},
    "berts": {1: ["plain"], 2: ["zero3+recompute+packed"]},
    "abnet": {1: ["plain"], 2: ["zero3+recompute"]},
    "transparent": {1: ["plain"], 2: ["zero3+recompute+packed"]},
    # The model of vanilla on a mixture of corpora with a schedule, a tag and two segmentations.
    "vanilla+mixture": {1: ["plain+adamw"], 2: ["zero2+packed+adamw"]},
}
# Methods whose engines are the same, and that share the start of the ranks.
JOINT = {
    ("gnmt", "convs2s", "merged", "coordination"): ["zero3+recompute"],
    ("dlcl", "relative_positions", "sdt", "msc"): ["zero2+packed"],
}
ENGINES |= {method: {1: ["plain"], 2: names} for methods, names in JOINT.items() for method in methods}
# Engines of each method on two pairs of tensor-parallel ranks, and the settings that make the model shallower there.
TENSOR = {
    "vanilla": ["plain+packed", "plain:bf16", "zero3+recompute"],
    "deep_decoder": ["zero2:fp16", "zero3"],
    "exits": ["zero2+packed"],
    "growing": ["zero0+recompute", "zero3"],
    "berts": ["zero3"],
    "transparent": ["zero3"],
    "dlcl": ["zero3+recompute+packed"],
    "relative_positions": ["zero3+recompute+packed"],
    "sdt": ["zero3+recompute+packed"],
    "msc": ["zero3+recompute+packed"],
}
# They also have the connections of deep stacks that have weights of their own.
DEPTHS: dict[str, dict[str, Any]] = {
    "vanilla": {"encoder_layers": 1, "decoder_layers": 1, "norm": "admin"},
    "deep_decoder": {"decoder_layers": 2, "norm": "layer_scale", "layer_scale": 0.5},
    "exits": {"encoder_loops": 2, "norm": "peri"},
}
RATED = {"vanilla+mixture": {"norm": "completep", "base_dim": 8}}
"""Parameters with learning rates of their own."""
WEIGHTED = ("deep_decoder", "exits")
"""Methods that are trained on pairs with weights."""
ALL = [(method, ranks, name) for method, by in ENGINES.items() for ranks, names in by.items() for name in names]
ALL += [(method, "2x2", name) for method, names in TENSOR.items() for name in names]
FP32 = [case for case in ALL if ":" not in case[2]]

Ranks = int | str
"""Number of ranks, "2x2" for two tensor-parallel pairs, or "1 of 2x2" for one process with the model of the pairs."""
Reports = Callable[[str, Ranks], dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """A function that returns the report of each engine, by its name, on a method and a number of ranks."""
    corpora = {weighted: tmp_path_factory.mktemp("engines") for weighted in (False, True)}
    for corpus in corpora.values():
        write_mixture(corpus)
    write_weights(corpora[True])

    def report(method: str, ranks: Ranks) -> dict[str, Any]:
        together = next((methods for methods in JOINT if method in methods), (method,))
        return launched(",".join(together), ranks)[method.partition("+")[0]]

    @cache
    def launched(methods: str, ranks: Ranks) -> dict[str, Any]:
        method = methods.partition(",")[0]
        if isinstance(ranks, int):
            names, count, tensor, model = ENGINES[method][ranks], ranks, 1, RATED.get(method, {})
        else:
            model = DEPTHS.get(method, {})
            names, count, tensor = (TENSOR[method], 4, 2) if ranks == "2x2" else (["plain"], 1, 1)
        directory = corpora[method in WEIGHTED]
        out = directory / f"{method}-{ranks}.json"
        worker = [str(ROOT / "tests/parity/engine_worker.py"), str(directory), str(out), methods]
        joined = ranks in (3, "2x2")  # The references are not.
        shared = {"TENSOR_RANKS": str(tensor), "MODEL": json.dumps(model), "JOINED": str(int(joined))}
        run_ranks([*worker, *names], count, directory, **shared)
        content: dict[str, Any] = json.loads(out.read_text())
        return content

    return report


def reference_of(reports: Reports, method: str, ranks: Ranks, name: str) -> dict[str, Any]:
    """Return the report of one plain process on the same model and objective as those of an engine."""
    one = 1 if ranks != "2x2" or method not in DEPTHS else "1 of 2x2"
    other = next((f"+{other}" for other in OTHERS if other in name.split("+")), "")
    reference: dict[str, Any] = reports(method, one)[f"plain{other}"]
    return reference


@pytest.mark.parametrize(("method", "ranks", "name"), FP32)
def test_losses_norms_and_weights_equal_those_of_one_plain_process(
    reports: Reports, method: str, ranks: Ranks, name: str
) -> None:
    reference, ours = reference_of(reports, method, ranks, name), reports(method, ranks)[name]
    assert len(ours["loss"]) == 8
    # Muon iterates in bfloat16, which may round gradients that differ by rounding to another number.
    bound, of_weights = (2e-4, 3e-3) if "muon" in name else (1e-5, 1e-5)
    assert ours["loss"] == pytest.approx(reference["loss"], abs=bound, rel=0)
    assert ours["norm"] == pytest.approx(reference["norm"], abs=bound, rel=0)
    for theirs, metrics in zip(reference["metrics"], ours["metrics"], strict=True):
        assert metrics == pytest.approx(theirs, abs=bound, rel=0)
    for parameter, weight in reference["weights"].items():
        np.testing.assert_allclose(ours["weights"][parameter], weight, rtol=0, atol=of_weights, err_msg=parameter)
    first, last = (np.median(losses) for losses in (reference["loss"][:4], reference["loss"][-4:]))
    assert last < first + (1.5 if method == "abnet" else 0.2), "abnet's loss grows with the tokens that are masked"
    is_whole = any(optimizer in name for optimizer in OTHERS[2:])  # whose changes do not follow from their states
    assert not (is_whole and ours["change"])
    for which in ("gradient",) if is_whole else ("gradient", "change"):
        norms, expected = ({key: value**0.5 for key, value in run[which].items()} for run in (ours, reference))
        assert len(norms) > 20 and max(expected.values()) > 1e-3
        assert norms == pytest.approx(expected, abs=bound, rel=10 * bound)


@pytest.mark.parametrize("name", ["plain+muon", "plain+adafactor"])
def test_another_optimizer_takes_other_steps(reports: Reports, name: str) -> None:
    adam, other = (reports("vanilla", 1)[engine]["weights"] for engine in ("plain", name))
    apart = {parameter: np.abs(np.subtract(other[parameter], weight)).max() for parameter, weight in adam.items()}
    assert min(apart["decoder.layers.0.feed_forward.up_proj.weight"], max(apart.values())) > 0.01


def test_coins_make_the_passes_of_r_drop_differ(reports: Reports) -> None:
    ddr, r_drop = (
        [sums["divergence"] for sums in reports("deep_decoder", 1)[name]["metrics"]]
        for name in ("plain", "plain+r_drop")
    )
    # Without dropout they are equal in updates in which both passes have drawn the same layers.
    assert sum(value > 1e-3 for value in r_drop) > len(r_drop) // 2 and r_drop != pytest.approx(ddr, rel=1e-3)


def test_gradients_that_ranks_have_in_different_orders_are_refused(reports: Reports) -> None:
    """ZeRO-2 would add the gradient of a bias on one rank to that of a weight on the other."""
    message = reports("vanilla", 2)["zero2"]["unequal"]
    assert "different orders" in message and re.search(r"rank 1 (\S+\.weight|\S+\.bias);", message)
    assert reports("vanilla", 1)["zero2"]["unequal"] == ""


def test_the_number_of_micro_batches_varies(reports: Reports) -> None:
    one, two = reports("vanilla", 1)["plain"]["counts"], reports("vanilla", 2)["zero2"]["counts"]
    assert len(set(one)) > 1 and len(set(two)) > 1
    assert two == [-(-many // 2) for many in one], "two ranks share an update's micro-batches evenly"


@pytest.mark.parametrize(("method", "ranks", "name"), ALL)
def test_a_run_probed_and_restored_half_way_is_equal_to_the_bit(
    reports: Reports, method: str, ranks: Ranks, name: str
) -> None:
    report = reports(method, ranks)[name]
    straight, resumed = report["resumed_loss"]
    assert straight == resumed
    assert report["resumed_bitwise"]
    assert report["hooked_in_layers"] == 0, "ZeRO-3 gathers whole layers"
    if not report["skipped"][-1]:
        assert sum(report["gradient"].values()) ** 0.5 == pytest.approx(report["norm"][-1], rel=1e-3)


@pytest.mark.parametrize("name", ["plain", "zero1", "zero2", "zero3"])
def test_a_model_grows_alike_under_every_engine(reports: Reports, name: str) -> None:
    reference, ours = reports("vanilla", 1)["plain"]["grown"], reports("vanilla", 2)[name]["grown"]
    assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-5, rel=0)
    assert sum(parameter.startswith("decoder.layers.3.") for parameter in reference["weights"]) > 10
    for parameter, weight in reference["weights"].items():
        np.testing.assert_allclose(ours["weights"][parameter], weight, rtol=0, atol=1e-5, err_msg=parameter)


@pytest.mark.parametrize(("method", "ranks", "name"), [case for case in ALL if ":" in case[2]])
def test_sixteen_bit_follows_fp32(reports: Reports, method: str, ranks: Ranks, name: str) -> None:
    reference, ours = reference_of(reports, method, ranks, name), reports(method, ranks)[name]
    assert sum(ours["skipped"]) <= 2
    assert ours["loss"] == pytest.approx(reference["loss"], rel=0.03)
    changes = [sum(run["change"].values()) ** 0.5 for run in (ours, reference)]
    assert ours["skipped"][-1] or changes[0] == pytest.approx(changes[1], rel=0.1)


@pytest.mark.parametrize("name", [*FULL, *SIXTEEN_BIT, "offload", *PACKED])
def test_hashes_of_gradients_tell_where_a_damaged_one_parts(reports: Reports, name: str) -> None:
    known = reports("vanilla", 2)[name]["before_the_step"]
    for rank, (first, again, damaged) in enumerate(known["hashes"]):
        assert first == again and len(first) > 1
        assert first[:-1] == damaged[:-1], "each micro-batch was hashed before the damage"
        assert [line["micro_batch"] for line in first] == [*range(len(first) - 1), None]
        assert all(len(line["gradients"]) > 20 for line in first[:-1])
        reduced, other = first[-1]["gradients"], damaged[-1]["gradients"]
        parts = {parameter for parameter in reduced if reduced[parameter] != other[parameter]}
        assert parts <= {"decoder.layers.0.feed_forward.up_proj.bias"}
        assert parts or name not in ("plain", "zero0"), f"rank {rank} has the whole gradient"
    everywhere = [line[0][-1]["gradients"] != line[2][-1]["gradients"] for line in known["hashes"]]
    assert any(everywhere), "the rank that holds the part has noticed"


@pytest.mark.parametrize("name", [*FULL, *SIXTEEN_BIT, "offload", *PACKED])
def test_an_update_is_computed_again_before_its_step(reports: Reports, name: str) -> None:
    known = reports("vanilla", 2)[name]["before_the_step"]
    assert known["same"] == [True], "once in an update, with the weights of its gradient"
    assert known["norms"][0] == known["norms"][1]
    causes = [] if name in ("zero3", "zero3:bf16", "offload") else [True]
    words = "the same when computed again, so data or arithmetic: the largest gradient, of norm"
    assert [cause.startswith(words) for cause in known["causes"]] == causes


@pytest.mark.parametrize("name", [*FULL, *SIXTEEN_BIT, "offload", *PACKED])
def test_a_skipped_update_leaves_weights_and_states_alone(reports: Reports, name: str) -> None:
    assert reports("vanilla", 2)[name]["before_the_step"]["stays"]


def test_the_loss_scale_of_deepspeed_goes_on_after_a_resume(reports: Reports) -> None:
    straight, resumed, least = reports("vanilla", 2)["zero2:fp16"]["scales"]
    assert straight == resumed and straight[1] == [256.0, 512.0], "it doubles after the window"
    assert straight[2][0] == pytest.approx(straight[2][1], rel=1e-3), "the norm of one update has one scale"
    assert straight[3] == pytest.approx(1.0 + 0.9 + 0.81, rel=1e-3), "of gradients without the scale"
    assert least == 1.0


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_gradients_of_many_micro_batches_are_added_in_fp32(reports: Reports, name: str) -> None:
    assert reports("vanilla", 2)[name]["lost_in_sums"] < 2e-3  # in bf16 0.008


def test_sixteen_bit_of_plain_torch_follows_deepspeed(reports: Reports) -> None:
    plain, zero1, fp32 = (reports("vanilla", 2)[name] for name in ("plain:bf16", "zero1:bf16", "plain"))
    assert plain["loss"] == pytest.approx(zero1["loss"], rel=0.01)
    apart, rounded = (
        np.max(
            [np.abs(np.subtract(other["weights"][name], weight)).max() for name, weight in plain["weights"].items()]
        )
        for other in (zero1, fp32)
    )
    assert apart < 0.02 and rounded > 1e-4


@pytest.mark.parametrize(("ranks", "name"), [case[1:] for case in ALL if case[0] == "growing"])
def test_a_frozen_bottom_does_not_change(reports: Reports, ranks: Ranks, name: str) -> None:
    reference, ours = reports("growing", 1)["plain"]["weights"], reports("growing", ranks)[name]["weights"]
    frozen = [parameter for parameter in reference if parameter.startswith("bottom.")]
    assert len(frozen) > 20
    assert all(ours[parameter] == reference[parameter] for parameter in frozen)
