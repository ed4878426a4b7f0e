"""Moves beside computing: what slabs hold is what was predicted, and records tell hidden from exposed seconds."""

import time

import pytest

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch, make_spec

POOL = "tp1:32 tp2:64 pp2:96 tp2pp2:128"


def watch_slabs(case, folder):
    """Per bucket that ran: (strategy, bytes in the slabs, most that were predicted); then records and order."""
    from hotspa_plugin.runtime.recorder import RunRecorder
    from hotspa_plugin.runtime.run_record import ModelInfo, PoolEntry, RunInfo

    trainer = build_trainer(case)
    rank = trainer.rank
    pool = trainer.pool
    entries = tuple(PoolEntry(strategy=str(e.strategy), bound_tokens=e.bound_tokens) for e in pool.entries)
    info = RunInfo(world_size=4, pool=entries, home=str(pool.home), model=ModelInfo(name="tiny"))
    trainer.record_to(RunRecorder(folder, rank, 4, info=info if rank == 0 else None))
    switcher, seen = trainer.loop.switcher, []

    def watched(runner, run):
        def wrapper(*args, **kwargs):
            seen.append((runner.label, switcher.slab_bytes, switcher.required_slab_bytes(runner.label)))
            return run(*args, **kwargs)

        return wrapper

    for runner in trainer.loop.runners:
        runner.run = watched(runner, runner.run)
    records, hidden = [], {}
    for step in range(len(case.lengths)):
        records += trainer.accumulate(make_batch(case, step)).buckets
        hidden = trainer.recorder.hidden_s()
    assert switcher.slab_bytes == 0 and not switcher.flushing
    return seen, records, hidden, switcher.running_order


@pytest.mark.ranks(4)
def test_slabs_records_and_order(workers, tmp_path):
    case = VerifyCase(pool=POOL, overlap="both", lengths=((20,) * 8 + (50,) * 8 + (90,) * 8 + (120,) * 8, (20, 120)))
    predicted = prediction(case)
    for seen, records, hidden, order in workers.run(watch_slabs, case=case, folder=str(tmp_path)):
        assert order[-1] == "tp1"  # all of the model must be brought there, so its switch is hidden
        labels = [label for label, _, _ in seen]
        assert labels[: len(order) + 1] == [*order, "tp2pp2"]
        for label, held, most in seen:
            assert held <= most, label
            # The analytic prediction knows no alignment of tensors in a slab.
            assert most <= predicted[label] + 2 * 64 * 100, label
        first_step = {record.strategy: record for record in records[:4]}
        assert first_step[order[0]].switch_hidden_s == 0  # nothing runs before it
        assert all(first_step[label].switch_hidden_s > 0 for label in order[1:])
        assert all(first_step[label].flush_hidden_s > 0 for label in order)
        assert set(hidden) == {"switch", "flush"}


def gradients_as_home_begins(case):
    """Largest gradient at home when its bucket begins, long after the flush beside it arrived; and when it is over."""
    trainer = build_trainer(case)
    switcher, home = trainer.loop.switcher, next(r for r in trainer.loop.runners if r.label == trainer.home.label)
    make_room, run, found = switcher.make_room_for_home, home.run, []

    def largest():
        return max(float(p.main_grad.abs().max()) for p in trainer.home.parameters.values())

    def make_room_late():
        time.sleep(0.5)
        make_room()

    def watched_run(*args, **kwargs):
        found.append(largest())
        return run(*args, **kwargs)

    switcher.make_room_for_home, home.run = make_room_late, watched_run
    trainer.accumulate(make_batch(case, 0))
    return [*found, largest()]


@pytest.mark.ranks(4)
def test_a_flush_that_arrives_early_waits_for_home_all_the_same(workers):
    """Else two threads may add to one gradient at a time, and sums depend on who is first."""
    case = VerifyCase(pool="tp1:32 tp2pp2:128", overlap="both", lengths=((20, 120, 9, 100),))
    for before, after in workers.run(gradients_as_home_begins, case=case):
        assert before == 0 < after


def prediction(case):
    from hotspa_plugin.cost.resident import resident_memory
    from hotspa_plugin.layout.analytic import GPTSizes

    pool, spec = make_spec(case, 4)
    sizes = GPTSizes(
        num_layers=spec.num_layers, hidden_size=spec.hidden_size, ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads, num_query_groups=spec.num_query_groups,
        kv_channels=spec.head_dim, vocab_size=spec.padded_vocab_size, dtype="float32",
    )  # fmt: skip
    memory = resident_memory(
        sizes, pool, distributed_optimizer=False, staging_bytes=0, overlap_flush=True, overlap_prefetch=True
    )
    return {entry.strategy: entry.slab_bytes for entry in memory}
