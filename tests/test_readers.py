"""Slots and forked children: what a child may be reading is not written again."""

import os
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from fifobatch.arena import Arena, Room


def fork_and_wait() -> tuple[int, int]:
    """Fork a child that ends when the descriptor returned with its pid is closed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    return pid, writer


def end(child: tuple[int, int]) -> None:
    pid, writer = child
    os.close(writer)
    os.waitpid(pid, 0)


def lend(arena: Arena, slot: int) -> list[memoryview]:
    return arena.lend(slot, [Room(arena, slot).put(memoryview(bytes(5000)))])


def test_a_slot_waits_for_every_child_that_was_forked_while_it_was_lent():
    arena = Arena()
    blocks = lend(arena, arena.take())
    first, second = fork_and_wait(), fork_and_wait()
    del blocks
    assert arena.take() == 2
    end(second)
    assert arena.take() == 3
    end(first)
    assert arena.take() == 1


def test_a_slot_that_was_not_lent_when_the_child_was_forked_does_not_wait():
    arena = Arena()
    before = lend(arena, arena.take())
    del before
    child = fork_and_wait()
    after = lend(arena, arena.take())
    del after
    assert arena.take() == 1
    end(child)


def test_a_slot_that_outlives_the_child_is_given_back_at_once():
    arena = Arena()
    blocks = lend(arena, arena.take())
    end(fork_and_wait())
    assert arena.take() == 2
    del blocks
    assert arena.take() == 1


def test_a_child_of_the_child_counts():
    arena = Arena()
    blocks = lend(arena, arena.take())
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        if os.fork():
            os._exit(0)
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.waitpid(pid, 0)
    del blocks
    assert arena.take() == 2
    os.close(writer)  # the grandchild ends, soon
    arena._readers._children[0][0].poll(None)
    assert arena.take() == 1


def test_forks_without_lent_slots_cost_no_descriptor():
    arena = Arena()
    slot = arena.take()
    before = len(os.listdir("/proc/self/fd"))
    end(fork_and_wait())
    assert len(os.listdir("/proc/self/fd")) == before
    arena.give_back(slot)


def test_descriptors_are_closed_with_the_arena():
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena()
    blocks = lend(arena, arena.take())
    child = fork_and_wait()
    del blocks, arena
    end(child)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_keeps_its_batch_while_the_parent_loads_on(run_script: Callable[..., Any]):
    script = """
        import gc, os, torch
        from fifobatch import FifoLoader

        class Numbers:
            def __len__(self):
                return 200

            def __getitem__(self, index):
                return torch.full((20_000,), index)

        with FifoLoader(Numbers(), batch_size=2, num_workers=2) as loader:
            batches = iter(loader.batches())
            batch = next(batches)
            done, start = os.pipe(), os.pipe()
            if not os.fork():
                os.close(start[1])
                os.read(start[0], 1)
                right = batch.data.tolist() == [[index] * 20_000 for index in batch.indices]
                os.write(done[1], b"right" if right else b"wrong")
                os._exit(0)
            del batch
            assert sum(1 for _ in batches) == 99
            os.close(start[1])
            print(os.read(done[0], 5).decode())
            os.wait()
    """
    finished = run_script(textwrap.dedent(script))
    assert (finished.stdout, finished.stderr) == ("right\n", "")


def test_the_childs_own_copies_change_nothing_in_the_parent():
    arena = Arena()
    blocks = lend(arena, arena.take())
    tensor = torch.frombuffer(blocks[0], dtype=torch.uint8)
    pid = os.fork()
    if not pid:
        del tensor, blocks
        os._exit(0)
    os.waitpid(pid, 0)
    assert arena.take() == 2
    assert tensor.sum() == 0
