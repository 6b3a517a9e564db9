"""Updates under DeepSpeed with ZeRO 0 to 3. No other file imports deepspeed."""

from __future__ import annotations

import logging
import math
import sys
import warnings
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.utils import (
    groups,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import LossOutput, TrainModule
from deepspeed_nmt.engine.contract import (
    WEIGHT,
    Engine,
    EngineScalars,
    OnGradient,
    OnMicroBatch,
    SavedState,
    TensorKey,
    UpdateResult,
    not_finite,
)
from deepspeed_nmt.engine.norms import Part, squared_changes, squares_of, whole_squares
from deepspeed_nmt.engine.optimizer import OptimizerConfig, set_lr
from deepspeed_nmt.engine.settings import zero_stage
from deepspeed_nmt.errors import TrainingError
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.parallel.collectives import (
    all_reduce_over_data_ranks,
    await_ranks,
    gather_lists,
    gather_over_data_ranks,
    max_over_ranks,
)
from deepspeed_nmt.parallel.tensor import gather, scatter, total_norm
from deepspeed_nmt.parallel.world import World


class DeepSpeedEngine(Engine):
    """Engine over a DeepSpeed engine, with a varying number of micro-batches per update.

    ``ds_config`` is completed by :func:`complete_ds_config`. ``dummy``, a batch without target tokens, creates the
    optimizer's state on resume.
    """

    def __init__(
        self, module: TrainModule, optimizer: OptimizerConfig, ds_config: dict[str, Any], world: World, dummy: Batch
    ) -> None:
        deepspeed_logger.setLevel(logging.WARNING)
        deepspeed.utils.nvtx.enable_nvtx = False  # markers for a profiler, at every function of ZeRO-3
        # DeepSpeed uses old names of torch's collectives, and torch warns at each call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        if world.device.type == "cpu":
            # DeepSpeed would compile shared-memory collectives, which needs a compiler and can leave a stale lock.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
            if ds_config["fp16"]["enabled"]:
                # The CPU supports fp16, slowly, although DeepSpeed denies it. Tests of the fp16 logic need it.
                deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        super().__init__(module, optimizer, world)
        self._dummy = dummy
        self._stage = zero_stage(ds_config)
        # Frozen weights are saved from this copy: DeepSpeed casts them to 16 bit, or partitions them.
        self._frozen = {
            name: parameter.detach().float().cpu().clone()
            for name, parameter in module.model.named_parameters()
            if not parameter.requires_grad
        }
        bf16_optimizer.see_memory_usage = lambda *arguments, **options: None  # prints, whatever the level of the log
        if self._stage == 3:
            for runtime in (partition_parameters, stage3):  # which ask for the rank before they decide to print
                runtime.print_rank_0 = lambda *arguments, **options: None
            if module.model.recomputes_all_layers():  # no product's weight is then kept until its backward pass
                section = {"memory_efficient_linear": False, **ds_config["zero_optimization"]}
                ds_config = {**ds_config, "zero_optimization": section}
            _fetch_by_layer(module.model)
            _partition(module, ds_config, world)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=self._optimizer, config=ds_config, dist_init_required=False, mpu=_unit_of(world)
        )
        self._wait_once()
        self.module = self._engine.module
        self._named: dict[str, nn.Parameter] = dict(self.module.model.named_parameters())
        self._trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        self._order = GradientOrder(self._trained, world) if self._stage > 0 else None
        self._stepped = self._is_linked = False
        self._before_step: Callable[[], object] | None = None
        # DeepSpeed computes the norm inside its step, and then calls the optimizer's, once for each group.
        self._optimizer.register_step_pre_hook(self._call_before_step)
        scaler = self._scaler()
        if scaler is not None:
            scaler.raise_error_at_min_scale = False  # the training loop limits the number of skipped updates
            # DeepSpeed 0.19.8 raises the scale before it divides the gradients by it; :meth:`update` does it after.
            self._zero._update_scale = lambda overflow=False: scaler.update_scale(True) if overflow else None

    def _wait_once(self) -> None:
        """Have ZeRO-2's step, and ZeRO-1's in fp16 and fp32, wait for the device once: for the norm of the gradient.

        DeepSpeed 0.19.8 looks at the norm three times. It also searches all gradients for infinite values, which the
        norm shows; but DeepSpeed leaves out of it what tensor-parallel ranks other than the first have in common.
        """
        zero = self._zero
        if not hasattr(zero, "scaled_global_norm") or zero.cpu_offload:
            return
        computed = zero.scaled_global_norm
        zero.scaled_global_norm = lambda: self._read(computed())
        if self._world.tensor_ranks == 1:
            zero.check_overflow = lambda **_: None

    @override
    def probe(self, batch: Batch) -> None:
        # The first update allocates the optimizer's states; in the second a batch runs beside another's gradients.
        self._update_nothing([self._dummy], [batch, batch])
        self._set_steps(0)

    def _update_nothing(self, *updates: Sequence[Batch]) -> None:
        """Carry out updates with loss and learning rate 0: the optimizer has zeros then, all else is as before."""
        scaler = self._scaler()
        scaling = {} if scaler is None else dict(vars(scaler))
        for batches in updates:
            self.update(batches, math.inf, 0.0)
        self._stepped = False
        self._clear_states()
        if scaler is not None:
            vars(scaler).update(scaling)

    @override
    def update(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: float,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = lambda index: None,
        measure: bool = False,
        on_gradient: OnGradient = lambda result: None,
    ) -> UpdateResult:
        # DeepSpeed averages gradients over the ranks; the contract is the sum over the update's tokens.
        factor = self._world.data_ranks / target_tokens
        self._engine.train()
        set_lr(self._zero, lr)
        scale = self._loss_scale()
        norm, skipped = 0.0, False
        culprits: tuple[str, ...] = ()

        def run(batch: Batch, is_last: bool) -> LossOutput:
            self._engine.set_gradient_accumulation_boundary(is_last)
            output: LossOutput = self._engine(batch)
            self._engine.backward(output.loss * factor)
            if not is_last:
                self._engine.step()
            return output

        sums = self._run(micro_batches, run, on_micro_batch)
        if self._stage == 0:
            # Stage 0 does not report the norm, and does not check for NaN.
            touched = [p for p in self._named.values() if p.grad is not None]
            gradients = [p.grad for p in touched if p.grad is not None]
            norm_of_sums = total_norm(touched, gradients, self._world)
            norm = await_ranks(lambda: float(norm_of_sums))
            skipped = not math.isfinite(norm)
            if skipped:
                culprits = not_finite({name: p.grad for name, p in self._named.items()})
                self._engine.zero_grad()
                self._engine.set_gradient_accumulation_boundary(False)  # step() then calls no optimizer
        elif explain:
            # DeepSpeed skips the step inside step(), which also frees the gradients.
            culprits = not_finite({name: self._part(p, GRADIENT) for name, p in self._trained.items()})
        if self._hashes is not None:
            self._hashes.write_reduced({name: self._part(p, GRADIENT) for name, p in self._trained.items()})
        if measure:  # step() frees the gradients
            gradient_P = squares_of([self._part(p, GRADIENT) for p in self._trained.values()]) / scale**2
        if self._order is not None:
            self._order.compare()
        if not skipped:
            known = norm if self._stage == 0 else None
            self._before_step = lambda: on_gradient(
                UpdateResult(sums, self._norm() if known is None else known, False, scale)
            )
        await_ranks(self._engine.step)
        self._before_step = None
        self._link_states()
        if self._stage > 0:
            norm = await_ranks(self._norm)
            skipped = bool(self._zero.overflow)
            if (scaler := self._scaler()) is not None and not skipped:
                scaler.update_scale(False)
        if self._order is not None:
            self._order.check()
        self._stepped = self._stepped or not skipped
        squares = None
        if measure and not skipped:
            parts = [self._optimizer_part(p) for p in self._trained.values()]
            change_P = squared_changes(self._method, parts, lr, self._steps())
            squares = whole_squares(self._trained, gradient_P, change_P, self._stage > 0, self._world)
        return UpdateResult(sums, norm, skipped, scale, culprits if skipped else (), squares)

    def _call_before_step(self, *arguments: object) -> None:
        """Call back before the first group of an update is stepped."""
        call, self._before_step = self._before_step, None
        if call is not None:
            call()

    def _norm(self) -> float:
        """Return the norm of the gradient that DeepSpeed has computed last; wait for it only once."""
        norm = self._zero._global_grad_norm
        self._zero._global_grad_norm = norm = float(self._read(norm) if isinstance(norm, Tensor) else norm)
        return norm

    def _read(self, norm: Tensor) -> Tensor:
        """Return a norm on the host."""
        return norm.cpu() if self._order is None else self._order.read(norm)

    @override
    def scalars(self) -> EngineScalars:
        step, scaler = self._steps() if self._stepped else 0, self._scaler()
        if scaler is None:
            return EngineScalars(step)
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        # At the end of a window, not 0: the next good update then doubles the scale.
        good = good and (good - 1) % scaler.scale_window + 1
        return EngineScalars(step, self._loss_scale(), good, scaler.cur_hysteresis)

    @override
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        self._update_nothing([self._dummy])
        for name, parameter in self._trained.items():
            if self._stage > 0:
                # The optimizer copied its fp32 weights from the model's after they had been cast to 16 bit.
                self._put(scatter(saved.weight(name), parameter), parameter)
            for which in self._saved_names(parameter, scalars):
                state = scatter(saved.optimizer_state(name, which), parameter).contiguous()
                if self._stage == 0:
                    self._optimizer.state[parameter][which].copy_(state)
                else:
                    self._put(state, parameter, which)
        self._set_steps(scalars.optimizer_step)
        scaler = self._scaler()
        if scaler is not None and scalars.loss_scale is not None:
            scaler.cur_scale, scaler.cur_hysteresis = scalars.loss_scale, scalars.hysteresis
            scaler.cur_iter, scaler.last_overflow_iter = scalars.good_updates, -1
        self._stepped = True

    def _put(self, value: Tensor, parameter: nn.Parameter, which: str | None = None) -> None:
        """Write a parameter's fp32 weight, or its optimizer state ``which``, into the optimizer."""
        value = value.to(self.device)
        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, value, which)  # None: its weight
            return
        # DeepSpeed's accessor for whole parameters fails if the ranks do not divide their size.
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = F.pad(value.flatten(), (0, size * self._world.data_ranks - value.numel()))
        safe_set_local_optimizer_state(parameter, padded.narrow(0, size * self._world.data_rank, size), which)

    @override
    def close(self) -> None:
        self._engine.destroy()
        # DeepSpeed keeps the grid for the process, and the next engine would have it even without tensor parallelism.
        groups.mpu = None

    def _link_states(self) -> None:
        """Link the optimizer's states of all groups with their parameters.

        Under ZeRO 1 and 2 DeepSpeed links them after the first step of the first group, before other groups have any.
        """
        groups = len(self._zero.param_groups)
        if self._is_linked or groups == 1 or not getattr(self._zero, "_hp_optimizer_states_linked", False):
            return
        if len(self._optimizer.state) == groups and all(self._optimizer.state.values()):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
            self._is_linked = True

    def _optimizer_part(self, parameter: nn.Parameter) -> Part | None:
        """Return this rank's part of a trained parameter and of its states; None if it holds no part."""
        weight = self._part(parameter, WEIGHT)
        states = [self._part(parameter, which) for which in self._state_names(parameter)]
        present = tuple(state for state in states if state is not None)
        if weight is None or len(present) < len(states):
            return None
        return Part(weight, present, self._groups[parameter])

    def _part(self, parameter: Any, which: str) -> Tensor | None:
        """Return this rank's part of a trained parameter, without padding; see :func:`shard`."""
        if self._stage == 0:
            values = {WEIGHT: parameter.detach(), GRADIENT: parameter.grad}
            value: Tensor | None = values[which] if which in values else self._optimizer.state[parameter][which]
            return value
        if self._stage < 3:
            return shard(parameter, which)
        part = _stage_3_part(parameter, which)
        return part[: max(0, parameter.ds_numel - part.numel() * self._world.data_rank)]

    def _scaler(self) -> Any:
        """Return DeepSpeed's dynamic loss scaler; None if the precision is not fp16."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def _loss_scale(self) -> float:
        return float(getattr(self._zero, "loss_scale", 1.0))  # neither torch's nor DeepSpeed's bf16 optimizer has one

    @override
    def _states_of(self, name: str) -> Sequence[str]:
        return self._state_names(self._trained[name]) if self._stepped and name in self._trained else ()

    @override
    def _gather(self, keys: Sequence[TensorKey]) -> list[Tensor]:
        trained = [key for key in keys if key[0] not in self._frozen]
        whole = dict(zip(trained, self._unsharded(trained), strict=True))
        tensors = [whole[key] if key in whole else self._frozen[key[0]] for key in keys]
        return gather(tensors, [self._named[name] for name, _ in keys], self._world)

    @torch.no_grad()
    def _unsharded(self, keys: Sequence[TensorKey]) -> list[Tensor]:
        """Return the fp32 weights or optimizer states of trained parameters, by one collective."""
        parameters: list[Any] = [self._named[name] for name, _ in keys]
        if self._stage == 0:
            parts = [self._part(parameter, which) for parameter, (_, which) in zip(parameters, keys, strict=True)]
            return [part for part in parts if part is not None]
        if not keys:
            return []
        if self._stage == 3:
            shards = [_stage_3_part(p, which) for p, (_, which) in zip(parameters, keys, strict=True)]
            everyones = gather_over_data_ranks(torch.cat(shards), self._world)
            columns = torch.split(everyones, [part.numel() for part in shards], dim=1)
            return [
                column.flatten()[: parameter.ds_numel].view(parameter.ds_shape)
                for parameter, column in zip(parameters, columns, strict=True)
            ]
        # A rank's share begins and ends anywhere in the optimizer's flat tensor. A sum with zeros is exact.
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=self.device)
        wholes = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, (_, which), whole in zip(parameters, keys, wholes, strict=True):
            if (part := shard(parameter, which)) is not None:
                whole.narrow(0, parameter._hp_mapping.lp_fragment_address.start, part.numel()).copy_(part)
        all_reduce_over_data_ranks(flat, self._world)
        return [whole.view(parameter.shape) for parameter, whole in zip(parameters, wholes, strict=True)]


class GradientOrder:
    """Check that all ranks have the gradients of an update in the same order.

    ZeRO 1 and 2 reduce gradients in buckets, one behind another as the backward pass has them, without their names
    (DeepSpeed 0.19.8, `reduce_independent_p_g_buckets_and_remove_grads`; ZeRO-3 sorts within a bucket). If the order
    differs between ranks, because one of them takes another path through the same arithmetic, gradients of different
    weights are added up, and nothing else notices: losses stay plausible.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self._names, self._world = list(parameters), world
        self._seen: list[int] = []
        self._extremes: Tensor | None = None
        if world.ranks > 1:
            for number, parameter in enumerate(parameters.values()):
                note = partial(lambda number, parameter: self._seen.append(number), number)
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def compare(self) -> None:
        """Begin to compare the order since the last check. Collective; the device is not waited for."""
        if self._world.ranks > 1:
            digest = zlib.crc32(array("l", self._seen).tobytes())
            self._extremes = max_over_ranks([digest, -digest], self._world)

    def read(self, norm: Tensor) -> Tensor:
        """Return a norm on the host, and with the same wait read what :meth:`check` needs."""
        if self._extremes is None:
            return norm.cpu()
        own = norm.double().reshape(1).to(self._extremes.device)  # DeepSpeed has it on the host if it offloads
        values = torch.cat([own, self._extremes]).cpu()
        self._extremes = values[1:]
        return values[0].to(norm.dtype).view(norm.shape)

    def check(self) -> None:
        """Raise on all ranks if the order that was compared last differs between them; begin anew."""
        extremes = self._extremes
        if extremes is not None and await_ranks(lambda: float(extremes.sum())) != 0.0:
            orders = gather_lists([self._seen], self._world)
            rank, place = next(
                (rank, place)
                for rank, order in enumerate(orders)
                for place, pair in enumerate(zip_longest(orders[0], order))
                if pair[0] != pair[1]
            )
            theirs, ours = (self._names[o[place]] if place < len(o) else "none" for o in (orders[rank], orders[0]))
            raise TrainingError(
                f"ranks 0 and {rank} reduced gradients in different orders, so the update is wrong: after {place} "
                f"equal ones rank 0 had {ours}, rank {rank} {theirs}; the checkpoints are right; give all hosts the "
                "same CPUs, torch and kernels, or use engine.name=plain"
            )
        self._extremes = None
        self._seen.clear()


class _ModelParallelUnit:
    """The grid of ranks as DeepSpeed reads it (argument ``mpu`` of ``deepspeed.initialize``)."""

    def __init__(self, world: World) -> None:
        tensor = {"rank": world.tensor_rank, "world_size": world.tensor_ranks, "group": world.tensor_group}
        data = {"rank": world.data_rank, "world_size": world.data_ranks, "group": world.data_group}
        grid = {"model_parallel": tensor, "tensor_model_parallel": tensor, "data_parallel": data}
        for name, values in grid.items():
            for what, value in values.items():
                setattr(self, f"get_{name}_{what}", partial(lambda value: value, value))


def _unit_of(world: World) -> _ModelParallelUnit | None:
    """Return the grid of ranks; None if it has only data-parallel ranks."""
    return _ModelParallelUnit(world) if world.tensor_ranks > 1 else None


def _partition(module: TrainModule, ds_config: dict[str, Any], world: World) -> None:
    """Round and partition a model for ZeRO-3, one parameter after another.

    ``deepspeed.initialize`` would first move the whole model to the GPU.
    """
    dtype = next((dtype for kind, dtype in DTYPES.items() if ds_config.get(kind, {}).get("enabled")), torch.float32)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    deepspeed.init_distributed(dist_init_required=False)
    deepspeed.zero.Init(
        module=module,
        data_parallel_group=world.data_group,
        config_dict_or_path=ds_config,
        dtype=dtype,
        mpu=_unit_of(world),
    )
    module.to(world.device)  # buffers


def _fetch_by_layer(model: TranslationModel) -> None:
    """Make ZeRO-3 fetch and release the parameters of a layer together: one all-gather, and hooks on layers alone.

    Modules inside a layer may then use each other's parameters.
    """
    for layer in model.all_layers():
        set_z3_leaf_module(layer, True)
    # DeepSpeed would reduce a leaf's gradients when its input has one: of a layer that is applied several times too
    # early, of a layer whose input needs none before there are any. Each parameter keeps its own hook.
    stage3.z3_leaf_parameter = lambda parameter: False


GRADIENT = "gradient"
"""Name of a parameter's gradient, beside WEIGHT and the names of its optimizer states."""


def _stage_3_part(parameter: nn.Parameter, which: str) -> Tensor:
    """Return this rank's part of a trained parameter, flat and with its padding."""
    part: Tensor
    if which == GRADIENT:
        part = safe_get_local_grad(parameter)
    else:
        part = safe_get_local_optimizer_state(parameter, None if which == WEIGHT else which)
    return part.flatten()


def shard(parameter: Any, which: str) -> Tensor | None:
    """Return this rank's part of a trained parameter, flat; None if it holds none.

    ``which`` is WEIGHT or an optimizer state, fp32; or GRADIENT, between the last backward pass and the step.
    DeepSpeed's accessor for whole gradients is a collective, but a rank enters it only if it holds a part.
    """
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    part: Tensor
    if which != GRADIENT:
        part = mapping.get_hp_fragment(None if which == WEIGHT else which)
        return part
    part = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    share = mapping.lp_fragment_address
    # In bf16 at stage 1 each rank has the whole gradient.
    return part.narrow(0, share.start, share.numel) if part.numel() == parameter.numel() else part
