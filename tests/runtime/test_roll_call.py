"""Naming the ranks that have gone silent."""

import threading
import time

import torch.distributed as dist

from hotspa_plugin.runtime.roll_call import describe, silent_ranks


def test_those_who_do_not_answer_are_named():
    store = dist.HashStore()
    answers = {}
    threads = [
        threading.Thread(target=lambda rank=rank: answers.update({rank: silent_ranks(store, rank, 4, wait_s=1.0)}))
        for rank in (0, 1, 3)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # their timeouts run out one after the other
    for thread in threads:
        thread.join()
    assert answers == {0: [2], 1: [2], 3: [2]}
    assert describe([2]) == "nothing was heard of rank 2: dead, stopped, or busy elsewhere"
    assert describe([0, 2]).startswith("nothing was heard of ranks 0, 2:")


def test_nobody_is_named_where_all_answer_or_the_store_is_gone():
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"hotspa/roll_call/{rank}", "-")
    assert silent_ranks(store, 0, 2, wait_s=0.2) == []
    assert describe([]) == ""

    class Gone:
        def set(self, *_):
            raise RuntimeError("Connection reset by peer")

    assert silent_ranks(Gone(), 0, 2) == []
