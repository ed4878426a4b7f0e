"""Samples reach the ranks that train on them, each read once, over gloo."""

import multiprocessing
import os
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.data import RandomTokenSource, Sample
from hotspa_plugin.data.exchange import exchange_samples, plan_exchange

LENGTHS = np.array([5, 1, 300, 17, 64, 2, 9, 31])
NUM_RANKS = 3
CASES = [
    ("one reader", [0], [[0, 1], [2, 3, 4], [5]]),
    ("two readers", [0, 2], [[6], [0, 1, 2], [3]]),
    ("all read", [0, 1, 2], [[0], [1, 2], [3]]),
    ("nobody needs anything", [0], [[], [], []]),
    ("idle ranks", [1], [[7], [], []]),
    ("one sample on several ranks", [0], [[3], [3, 4], [4, 3]]),
    ("readers by sample", [[0], [1], [2], [0, 1], [1, 2], [0], [1], [2]], [[0, 1, 2, 3], [4, 5], [6, 7]]),
]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 6))
def test_plan_serves_every_need_once(data, num_ranks):
    ranks = st.integers(0, num_ranks - 1)
    needed = data.draw(
        st.lists(st.lists(st.integers(0, 7), max_size=6, unique=True), min_size=num_ranks, max_size=num_ranks)
    )
    readers = data.draw(st.sets(ranks, min_size=1))
    plan = plan_exchange(needed, readers=sorted(readers), lengths=LENGTHS)
    served = [(receiver, sample) for own in plan.read_by_rank for receiver, sample in own]
    assert sorted(served) == sorted((rank, sample) for rank, own in enumerate(needed) for sample in own)
    for reader, own in enumerate(plan.read_by_rank):
        assert not own or reader in readers
        assert all(receiver == reader or receiver not in readers for receiver, _ in own)


def test_plan_spreads_the_sending():
    plan = plan_exchange([[], [], [0, 1, 2, 3]], readers=[0, 1], lengths=np.array([10, 10, 10, 10]))
    assert [len(own) for own in plan.read_by_rank] == [2, 2, 0]


def test_plan_without_a_reader_is_refused():
    with pytest.raises(ValueError, match="sample 3: readers"):
        plan_exchange([[3]], readers=[], lengths=LENGTHS)
    with pytest.raises(ValueError, match="sample 3: readers"):
        plan_exchange([[3]], readers=[1], lengths=LENGTHS)


def exchange_all_cases(rank, port, outcomes):
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
        source = RandomTokenSource(LENGTHS, vocab_size=1000, seed=4)
        for name, readers, needed in CASES:
            reads = []

            def read(sample, reads=reads):
                reads.append(sample)
                return source.tokens(sample)

            got = exchange_samples(needed, readers=readers, lengths=LENGTHS, read=read)
            assert set(got) == set(needed[rank]), name
            for sample, rows in got.items():
                assert rows.shape == (1, LENGTHS[sample]) and np.array_equal(rows[0], source.tokens(sample)), name
            assert len(reads) == len(set(reads)), name
            if isinstance(readers[0], int) and rank not in readers:
                assert not reads, name

        def read_rows(sample):
            whole = Sample.from_tokens(source.tokens(sample))
            return np.stack([whole.tokens, whole.labels, whole.loss_mask.astype(np.int64)])

        got = exchange_samples([[1], [2], [0, 3]], readers=[0], lengths=LENGTHS, read=read_rows, num_rows=3)
        assert all(np.array_equal(rows, read_rows(sample)) for sample, rows in got.items())
        with pytest.raises(ValueError, match="a plan for 2 ranks in a group of 3"):
            exchange_samples([[0], []], readers=[0], lengths=LENGTHS, read=read_rows)
        dist.destroy_process_group()
        outcomes.put((rank, None))
    except BaseException:
        outcomes.put((rank, traceback.format_exc()))
        raise


def test_exchange_over_gloo(free_port):
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    workers = [
        context.Process(target=exchange_all_cases, args=(rank, free_port, outcomes)) for rank in range(NUM_RANKS)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            rank, failure = outcomes.get(timeout=120)
            assert failure is None, f"rank {rank}: {failure}"
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
