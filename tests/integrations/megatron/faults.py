"""Mistakes made on purpose, inside the rank processes; each takes a ``pytest.MonkeyPatch``."""

import dataclasses

import numpy as np
import pytest
import torch

from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.runtime.rank_process import resolve_target


def run_with(fault, target, **kwargs):
    """``target(**kwargs)`` with the named fault in place."""
    prepare_process()
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return resolve_target(target)(**kwargs)


def _change_copies(patch, change):
    """``change(copies, at_home)`` alters what the planner of flushes thinks of a group's copies."""
    from hotspa_plugin.resharding import flush_planner as planner

    original = planner.copies_of_group

    def copies_of_group(cells, side, group, layout):
        copies = original(cells, side, group, layout)
        return change(copies, side == planner.DESTINATION)

    patch.setattr(planner, "copies_of_group", copies_of_group)


def _replace_plans(patch, name, change):
    """``change(plan)`` alters every plan that ``name`` builds for the switcher."""
    from hotspa_plugin.runtime import hot_switcher

    original = getattr(hot_switcher, name)
    patch.setattr(hot_switcher, name, lambda *args, **kwargs: change(original(*args, **kwargs)))


def partial_added_to_every_copy(patch):
    """Query and key norms: every rank's part is added on every tensor-parallel rank of home."""

    def change(copies, at_home):
        replicated = at_home and len(np.unique(copies.tp_copy)) > 1
        return dataclasses.replace(copies, identical=np.ones_like(copies.identical)) if replicated else copies

    _change_copies(patch, change)


def partial_read_from_one_copy(patch):
    """Norms under sequence parallelism, query and key norms: of the parts only one is read."""

    def change(copies, at_home):
        replicated = not at_home and len(np.unique(copies.tp_copy)) > 1
        return dataclasses.replace(copies, identical=np.ones_like(copies.identical)) if replicated else copies

    _change_copies(patch, change)


def identical_added_to_one_copy(patch):
    """Norms without sequence parallelism: added on one tensor-parallel rank of home only."""

    def change(copies, at_home):
        return dataclasses.replace(copies, identical=np.zeros_like(copies.identical)) if at_home else copies

    _change_copies(patch, change)


def identical_read_from_every_copy(patch):
    """Norms without sequence parallelism: the same gradient is read from every tensor-parallel rank."""

    def change(copies, at_home):
        return copies if at_home else dataclasses.replace(copies, identical=np.zeros_like(copies.identical))

    _change_copies(patch, change)


def tied_added_to_both_holders(patch):
    """Home's second holder of a tied embedding is given the gradient too."""

    def change(copies, at_home):
        if not (at_home and copies.stage_copy.any()):
            return copies
        # The two holders pose as identical tensor-parallel copies.
        return dataclasses.replace(
            copies,
            tp_copy=copies.stage_copy,
            stage_copy=np.zeros_like(copies.stage_copy),
            identical=np.ones_like(copies.identical),
        )

    _change_copies(patch, change)


def replica_left_out(patch):
    """The gradients of the last data-parallel replica stay where they are."""

    def change(plan):
        replicas = plan.source.dp_rank
        return dataclasses.replace(plan, routes=plan.routes.select(replicas[plan.routes.source_rank] < replicas.max()))

    _replace_plans(patch, "build_flush_plan", change)


def piece_left_out_of_switch(patch):
    """One piece is never brought to the strategy: whatever is in the slab trains in its place."""
    _replace_plans(
        patch,
        "build_switch_plan",
        lambda plan: dataclasses.replace(plan, routes=plan.routes.select(_all_but_one(plan))),
    )


def piece_left_out_of_flush(patch):
    """One piece of the gradient never comes home."""
    _replace_plans(
        patch, "build_flush_plan", lambda plan: dataclasses.replace(plan, routes=plan.routes.select(_all_but_one(plan)))
    )


def _all_but_one(plan):
    kept = np.ones(len(plan.routes), dtype=bool)
    kept[len(kept) // 2] = False
    return kept


def flush_skipped(patch):
    """One strategy's gradients are never brought home."""
    from hotspa_plugin.runtime.hot_switcher import HotSwitcher

    original = HotSwitcher.start_flush

    def start_flush(self, label, **options):
        if label != next(iter(self._tenants)):
            original(self, label, **options)

    patch.setattr(HotSwitcher, "start_flush", start_flush)


def gradients_kept_between_buckets(patch):
    """A strategy starts with the gradients that the last one left in the slab."""
    from hotspa_plugin.runtime.slab import Slab

    original = Slab.fill
    patch.setattr(Slab, "fill", lambda self, byte: original(self, byte) if byte else None)
    # Memory that is released and taken again comes back as it was, so that there is something to find.
    patch.setattr(Slab, "release", lambda self: None)


def gate_and_up_cut_together(patch):
    """A rank's rows of gate and up are taken as one run of rows of the whole tensor."""
    from hotspa_plugin.integrations.megatron import layout_reader

    original = layout_reader._sharded_tensors

    def sharded_tensors(state):
        if not isinstance(state, layout_reader.ShardedTensorFactory):
            yield from original(state)
            return
        pieces = list(original(state))
        rows = pieces[0].data.shape[0]
        axis = pieces[0].prepend_axis_num
        first = 2 * pieces[0].global_offset[axis]
        for index, piece in enumerate(pieces):
            offset = list(piece.global_offset)
            offset[axis] = first + index * rows
            yield dataclasses.replace(piece, global_offset=tuple(offset))

    patch.setattr(layout_reader, "_sharded_tensors", sharded_tensors)


def padding_trained(patch):
    """Targets that are padding count like others."""

    def change(batch):
        mask = torch.zeros_like(batch.loss_mask)
        if batch.loss_mask.shape[0] == 1:
            mask[0, sum(batch.lengths) :] = 1
        else:
            for row, length in enumerate(batch.lengths):
                mask[row, length:] = 1
        return dataclasses.replace(batch, loss_mask=batch.loss_mask + mask)

    _change_batches(patch, change)


def padding_trained_uncounted(patch):
    """The loss takes padding in, the count of targets does not."""
    from hotspa_plugin.integrations.megatron import runner

    original = runner.per_token_loss

    def per_token_loss(loss_mask, losses):
        loss_sum, num_targets, report = original(torch.ones_like(loss_mask), losses)
        return (
            loss_sum,
            loss_mask.sum().to(torch.int),
            {k: torch.stack([v[0], loss_mask.sum()]) for k, v in report.items()},
        )

    patch.setattr(runner, "per_token_loss", per_token_loss)


def documents_see_each_other(patch):
    """Attention spans the whole packed row."""

    def change(batch):
        ends = torch.tensor([0, batch.tokens.shape[1]], dtype=torch.int32)
        return dataclasses.replace(batch, cu_seqlens=ends, max_seqlen=batch.tokens.shape[1])

    _change_batches(patch, change)


def positions_run_on(patch):
    """Positions are counted through a packed row, over the ends of documents."""
    _change_batches(
        patch, lambda batch: dataclasses.replace(batch, position_ids=torch.arange(batch.tokens.shape[1])[None])
    )


def _change_batches(patch, change):
    from hotspa_plugin.runtime import bucket_loop

    for name in ("pack_micro_batch", "pad_micro_batch"):
        original = getattr(bucket_loop, name)
        patch.setattr(bucket_loop, name, lambda *args, _of=original, **kwargs: change(_of(*args, **kwargs)))


def mean_of_means(patch):
    """Each micro-batch's loss is a mean over its own targets, scaled back by the mean number of targets."""
    from hotspa_plugin.integrations.megatron import runner

    original = runner.per_token_loss

    def per_token_loss(loss_mask, losses):
        loss_sum, num_targets, report = original(loss_mask, losses)
        return loss_sum / loss_mask.sum().clamp(min=1) * 30, num_targets, report

    patch.setattr(runner, "per_token_loss", per_token_loss)


def count_summed_over_replicas(patch):
    """Every data-parallel rank hands the global count to finalize, which adds them up."""
    from hotspa_plugin.integrations.megatron.schedule import HotSwitchSchedule

    original = HotSwitchSchedule._finish_gradients

    def finish(self, num_target_tokens, options):
        place = self.home.coordinate
        self.home = dataclasses.replace(self.home, coordinate=dataclasses.replace(place, dp=0))
        try:
            original(self, num_target_tokens, options)
        finally:
            self.home = dataclasses.replace(self.home, coordinate=place)

    patch.setattr(HotSwitchSchedule, "_finish_gradients", finish)


def gradients_accumulated_in_bf16(patch):
    """Every addition into an accumulator is rounded to bf16."""
    from hotspa_plugin.integrations.megatron import session

    def attach(parameter, accumulator):
        parameter.main_grad = accumulator

        def accumulate(parameter):
            parameter.main_grad.copy_((parameter.main_grad + parameter.grad).bfloat16())
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

    patch.setattr(session, "attach_gradient", attach)


FAULTS = {
    fault.__name__: fault
    for fault in (
        partial_added_to_every_copy,
        partial_read_from_one_copy,
        identical_added_to_one_copy,
        identical_read_from_every_copy,
        tied_added_to_both_holders,
        replica_left_out,
        piece_left_out_of_switch,
        piece_left_out_of_flush,
        flush_skipped,
        gradients_kept_between_buckets,
        gate_and_up_cut_together,
        padding_trained,
        padding_trained_uncounted,
        documents_see_each_other,
        positions_run_on,
        mean_of_means,
        count_summed_over_replicas,
        gradients_accumulated_in_bf16,
    )
}
