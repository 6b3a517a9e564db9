"""Updates under DeepSpeed with ZeRO 0 to 3. No other file imports deepspeed."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3
from deepspeed.utils import (
    groups,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.engine.base import (
    MOMENTS,
    WEIGHT,
    Engine,
    EngineScalars,
    OnMicroBatch,
    SavedState,
    UpdateResult,
    Wanted,
    add_sums,
    ignore_micro_batch,
    not_finite,
    seed_dropout,
)
from deepspeed_nmt.engine.ds_config import zero_stage
from deepspeed_nmt.engine.feed import on_device
from deepspeed_nmt.engine.norms import AdamPart, adam_groups, squared_changes, squares_of, whole_squares
from deepspeed_nmt.engine.shards import GRADIENT, shard
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.parallel.collectives import all_reduce_over_data_ranks, gather_over_data_ranks
from deepspeed_nmt.parallel.slices import gather, scatter, total_norm
from deepspeed_nmt.parallel.tensor import ModelParallelUnit
from deepspeed_nmt.parallel.world import World


class DeepSpeedEngine(Engine):
    """Engine over a DeepSpeed engine, with a varying number of micro-batches per update.

    Args:
        module: model and objective with their weights loaded.
        optimizer: torch's Adam over the module's parameters.
        ds_config: DeepSpeed's configuration, completed by :func:`complete_ds_config`.
        world: the ranks.
        dummy: a batch without target tokens, which creates the optimizer's state on resume.
    """

    def __init__(
        self,
        module: TrainModule,
        optimizer: torch.optim.Optimizer,
        ds_config: dict[str, Any],
        world: World,
        dummy: Batch,
    ) -> None:
        deepspeed_logger.setLevel(logging.WARNING)
        # DeepSpeed uses old names of torch's collectives, and torch warns at each call.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        if world.device.type == "cpu":
            # DeepSpeed would compile shared-memory collectives, which needs a compiler and can leave a stale lock.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
            if ds_config["fp16"]["enabled"]:
                # The CPU supports fp16, slowly, although DeepSpeed denies it. Tests of the fp16 logic need it.
                deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        self.device = world.device
        self._world = world
        self._dummy = dummy
        self._stage = zero_stage(ds_config)
        self._clip_norm = float(ds_config["gradient_clipping"])
        self._groups = adam_groups(optimizer)
        # Frozen weights are saved from this copy: DeepSpeed casts them to 16 bit, or partitions them.
        self._frozen = {
            name: parameter.detach().float().cpu().clone()
            for name, parameter in module.model.named_parameters()
            if not parameter.requires_grad
        }
        bf16_optimizer.see_memory_usage = lambda *arguments, **options: None  # prints, whatever the level of the log
        if self._stage == 3:
            _fetch_by_layer(module.model)
            _partition(module, ds_config, world)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=ds_config, dist_init_required=False, mpu=_unit_of(world)
        )
        self.module = self._engine.module
        self._named: dict[str, nn.Parameter] = dict(self.module.model.named_parameters())
        self._trained = {name: parameter for name, parameter in self._named.items() if parameter.requires_grad}
        self._stepped = False
        scaler = self._scaler()
        if scaler is not None:
            scaler.raise_error_at_min_scale = False  # the training loop limits the number of skipped updates

    @override
    def update(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: int,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
        measure: bool = False,
    ) -> UpdateResult:
        # DeepSpeed averages gradients over the ranks; the contract is the sum over the update's tokens.
        factor = self._world.data_ranks / target_tokens
        result = self._run(micro_batches, factor, lr, explain, on_micro_batch, measure)
        self._stepped = self._stepped or not result.skipped
        return result

    @override
    def probe(self, batch: Batch) -> None:
        scaler = self._scaler()
        scaling = {} if scaler is None else dict(vars(scaler))
        self._run([self._dummy], 0.0, 0.0)  # allocates Adam's moments
        self._run([batch, batch], 0.0, 0.0)  # the second one runs while the gradients of the first are held
        for state in self._inner().state.values():
            for which in MOMENTS:
                state[which].zero_()
        self._set_optimizer_step(0)
        if scaler is not None:
            vars(scaler).update(scaling)

    def _run(
        self,
        micro_batches: Sequence[Batch],
        factor: float,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
        measure: bool = False,
    ) -> UpdateResult:
        """Carry out one update with the loss multiplied by ``factor``; see :meth:`Engine.update`."""
        self._engine.train()
        for group in self._zero.param_groups:
            group["lr"] = lr
        sums: dict[str, Tensor] = {}
        scale = self._loss_scale()
        norm, skipped = 0.0, False
        culprits: tuple[str, ...] = ()
        for index, batch in enumerate(on_device(micro_batches, self.device)):
            on_micro_batch(index)
            last = index == len(micro_batches) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            seed_dropout(batch, self._world.data_rank)
            output = self._engine(batch)
            self._engine.backward(output.loss * factor)
            add_sums(sums, {"loss": output.loss, "nll": output.nll, **output.metrics})
            if last and self._stage == 0:
                # Stage 0 does not report the norm, and does not check for NaN.
                touched = [p for p in self._named.values() if p.grad is not None]
                gradients = [p.grad for p in touched if p.grad is not None]
                norm = float(total_norm(touched, gradients, self._world))
                skipped = not math.isfinite(norm)
                if skipped:
                    culprits = not_finite({name: p.grad for name, p in self._named.items()})
                    self._engine.zero_grad()
                    for gradient in gradients:
                        gradient.zero_()
                    for group in self._zero.param_groups:
                        group["lr"] = 0.0
            elif last and explain:
                # DeepSpeed skips the step inside step(), which also frees the gradients.
                culprits = not_finite({name: self._part(p, GRADIENT) for name, p in self._trained.items()})
            if last and measure:  # step() frees the gradients
                gradient_P = squares_of([self._part(p, GRADIENT) for p in self._trained.values()]) / scale**2
            self._engine.step()
        if self._stage > 0:
            norm, skipped = float(self._engine.get_global_grad_norm()), bool(self._zero.overflow)
        squares = None
        if measure and not skipped:
            change_P = squared_changes([self._adam_part(p) for p in self._trained.values()], lr, self._steps())
            squares = whole_squares(self._trained, gradient_P, change_P, self._stage > 0, self._world)
        return UpdateResult(sums, norm, skipped, scale, culprits if skipped else (), squares)

    @override
    def scalars(self) -> EngineScalars:
        steps = [int(state["step"]) for state in self._inner().state.values() if "step" in state]
        scaler = self._scaler()
        good = 0
        if scaler is not None:
            good = (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window
        return EngineScalars(max(steps, default=0) if self._stepped else 0, self._loss_scale(), good)

    @override
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        # An update with loss and learning rate 0 creates the optimizer's state in its layout, and changes no weight.
        self._run([self._dummy], 0.0, 0.0)
        for name, parameter in self._named.items():
            if not parameter.requires_grad:
                continue
            if self._stage > 0:
                # The optimizer copied its fp32 weights from the model's after they had been cast to 16 bit.
                self._put(scatter(saved.weight(name), parameter), parameter)
            for which in MOMENTS:
                moment = scatter(saved.moment(name, which), parameter).contiguous()
                if self._stage == 0:
                    self._zero.state[parameter][which].copy_(moment)
                else:
                    self._put(moment, parameter, which)
        self._set_optimizer_step(scalars.optimizer_step)
        scaler = self._scaler()
        if scaler is not None:
            scaler.cur_scale = scalars.loss_scale
            scaler.cur_iter = scalars.good_updates
            scaler.last_overflow_iter = -1
        self._stepped = True

    def _put(self, value: Tensor, parameter: nn.Parameter, which: str | None = None) -> None:
        """Write a parameter's fp32 weight, or its moment ``which``, into the optimizer."""
        value = value.to(self.device)
        if self._stage < 3:
            if which is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, which)
            return
        # DeepSpeed's accessor for whole parameters fails if the ranks do not divide their size.
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = F.pad(value.flatten(), (0, size * self._world.data_ranks - value.numel()))
        part = padded.narrow(0, size * self._world.data_rank, size)
        if which is None:
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, which)

    @override
    def close(self) -> None:
        self._engine.destroy()
        # DeepSpeed keeps the grid for the process, and the next engine would have it even without tensor parallelism.
        groups.mpu = None

    def _inner(self) -> torch.optim.Optimizer:
        """Return torch's optimizer, which ZeRO's optimizer wraps."""
        inner: torch.optim.Optimizer = self._zero if self._stage == 0 else self._zero.optimizer
        return inner

    def _set_optimizer_step(self, step: int) -> None:
        """Set the number of steps that Adam has taken."""
        for state in self._inner().state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(step)
            elif "step" in state:
                state["step"] = step

    def _steps(self) -> int:
        """Return the number of steps that Adam has taken; it is the same for all parameters."""
        return int(next(iter(self._inner().state.values()))["step"])

    def _adam_part(self, parameter: nn.Parameter) -> AdamPart | None:
        """Return this rank's part of a trained parameter and of its moments; None if it holds no part."""
        weight, mean, square = (self._part(parameter, which) for which in (WEIGHT, *MOMENTS))
        if weight is None or mean is None or square is None:
            return None
        return AdamPart(weight, mean, square, self._groups[parameter])

    def _part(self, parameter: Any, which: str) -> Tensor | None:
        """Return this rank's part of a trained parameter, without padding; see :func:`shard`."""
        if self._stage == 0:
            own = {WEIGHT: parameter.detach(), GRADIENT: parameter.grad}
            found: Tensor | None = own[which] if which in own else self._zero.state[parameter][which]
            return found
        if self._stage < 3:
            return shard(parameter, which)
        part = self._stage_3_part(parameter, which)
        return part[: max(0, parameter.ds_numel - part.numel() * self._world.data_rank)]

    def _stage_3_part(self, parameter: nn.Parameter, which: str) -> Tensor:
        """Return this rank's part of a trained parameter, flat and with its padding."""
        if which == GRADIENT:
            part: Tensor = safe_get_local_grad(parameter)
        elif which == WEIGHT:
            part = safe_get_local_fp32_param(parameter)
        else:
            part = safe_get_local_optimizer_state(parameter, which)
        return part.flatten()

    def _scaler(self) -> Any:
        """Return DeepSpeed's dynamic loss scaler; None if the precision is not fp16."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def _loss_scale(self) -> float:
        """Return the current factor on the loss."""
        return float(getattr(self._zero, "loss_scale", 1.0))  # neither torch's nor DeepSpeed's bf16 optimizer has one

    @override
    def _moments_of(self, name: str) -> Sequence[str]:
        return MOMENTS if self._stepped and name not in self._frozen else ()

    @override
    def _gather(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        trained = [each for each in wanted if each[0] not in self._frozen]
        found = dict(zip(trained, self._unsharded(trained), strict=True))
        tensors = [found[each] if each in found else self._frozen[each[0]] for each in wanted]
        return gather(tensors, [self._named[name] for name, _ in wanted], self._world)

    @torch.no_grad()
    def _unsharded(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Return the fp32 weights or moments of trained parameters, by one collective over data-parallel ranks."""
        parameters: list[Any] = [self._named[name] for name, _ in wanted]
        if self._stage == 0:
            parts = [self._part(parameter, which) for parameter, (_, which) in zip(parameters, wanted, strict=True)]
            return [part for part in parts if part is not None]
        if not wanted:
            return []
        if self._stage == 3:
            shards = [self._stage_3_part(p, which) for p, (_, which) in zip(parameters, wanted, strict=True)]
            columns = torch.split(
                gather_over_data_ranks(torch.cat(shards), self._world), [part.numel() for part in shards], dim=1
            )
            return [
                column.flatten()[: parameter.ds_numel].view(parameter.ds_shape)
                for parameter, column in zip(parameters, columns, strict=True)
            ]
        # A rank's share begins and ends anywhere in the optimizer's flat tensor. A sum with zeros is exact.
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=self.device)
        wholes = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, (_, which), whole in zip(parameters, wanted, wholes, strict=True):
            if (part := shard(parameter, which)) is not None:
                whole.narrow(0, parameter._hp_mapping.lp_fragment_address.start, part.numel()).copy_(part)
        all_reduce_over_data_ranks(flat, self._world)
        return [whole.view(parameter.shape) for parameter, whole in zip(parameters, wholes, strict=True)]


def _unit_of(world: World) -> ModelParallelUnit | None:
    """Return the grid of ranks as DeepSpeed reads it; None if it has only data-parallel ranks."""
    return ModelParallelUnit(world) if world.tensor_ranks > 1 else None


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
