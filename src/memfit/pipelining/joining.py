"""From a plan with stages to the model as one rank of a pipeline has it."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from memfit.batches import Batch, LossFunction
from memfit.capture.part_calls import find_part_calls
from memfit.errors import InputError, PlanFileError
from memfit.parallel.pipeline import Division, Pipeline, mesh_of_pipelines
from memfit.parallel.schedule import Region, StageEnds
from memfit.pipelining.batch_reads import with_real_reads
from memfit.step.device import device_of
from memfit.step.part_calls import PartCalls
from memfit.techniques.choices import regions
from memfit.techniques.sharding import Pipelines
from memfit.values.plan import Plan


def join(plan: Plan, model: nn.Module, loss_fn: LossFunction | None, group: dist.ProcessGroup) -> Pipeline:
    """This rank's stage of a model; what only other stages use is taken out of it.

    Args:
        plan: of this model, the same on every rank.
        model: whole, with the same values on every rank.
        loss_fn: as for `memfit.plan`.
        group: all ranks of this run.

    Raises:
        InputError: there is another number of ranks.
        PlanFileError: the plan names parts or parameters that the model does not have.
    """
    pipeline = plan.pipeline
    assert pipeline is not None, "whoever calls has looked"
    if group.size() != pipeline.ranks:
        raise InputError(
            f"the plan is for {pipeline.ranks} ranks and this run has {group.size()}: start as many processes (torchrun --nproc-per-node {pipeline.ranks}), "
            "or plan again"
        )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    named = {*pipeline.everywhere, *(name for names in pipeline.parameters for name in names)}
    missing = sorted({path for path in pipeline.parts if path not in modules} | (named - parameters.keys()))
    if missing:
        raise PlanFileError(f"the plan's stages name {missing[0]}, which this model does not have: plan again for it")
    division = Division(
        pipeline.parts,
        StageEnds(pipeline.ends, pipeline.cut.schedule, plan.choices.micro_batches, plan.choices.micro_batch_size),
        tuple(map(frozenset, pipeline.parameters)),
        frozenset(pipeline.everywhere),
        plan.choices.weights,
        Pipelines.of(plan.choices.sharding).shards_state,
    )
    mesh = mesh_of_pipelines(device_of(model).type, pipeline.length, pipeline.replicas)
    region = partial(regions, plan.choices, model, device_of(model).type)
    look = partial(_look, model, loss_fn, list(pipeline.parts), region)
    return Pipeline(model, loss_fn, look, division, mesh, region)


def _look(
    model: nn.Module, loss_fn: LossFunction | None, paths: list[str], region: Region, micro_batch: Batch
) -> PartCalls:
    calls = find_part_calls(model, micro_batch, loss_fn, paths, region)
    return with_real_reads(calls, model, micro_batch, loss_fn, region)
