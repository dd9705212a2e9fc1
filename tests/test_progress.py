"""The progress bar: what it says, where, and that it is closed."""

import io
import re

import pytest
from torch.utils.data import Sampler

from fifobatch import FifoLoader
from fifobatch.testing import ManualExecutor


class Endless(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        while True:
            yield 0


def bar(text):
    """What stands on the bar's line in the end, and how many lines there are."""
    return re.split(r"[\r\n]", text.rstrip("\n"))[-1], text.count("\n")


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ({"batch_size": 3}, "4/4"),
        ({"batch_size": 3, "drop_last": True}, "3/3"),
        ({"batch_size": None}, "10/10"),
        ({"sampler": [1, 2, 3], "batch_size": 2}, "2/2"),
    ],
)
def test_the_total_is_the_loaders_length(capsys, arguments, counts):
    list(FifoLoader(range(10), num_workers=0, progress=True, **arguments))
    line, lines = bar(capsys.readouterr().err)
    assert counts in line
    assert lines == 1


def test_an_unknown_total_is_no_total(capsys):
    batches = iter(FifoLoader(range(1), sampler=Endless(), num_workers=0, progress=True))
    for _ in range(5):
        next(batches)
    batches.close()
    line, lines = bar(capsys.readouterr().err)
    assert "5batch" in line
    assert lines == 1


def test_a_wrong_length_does_no_harm(capsys):
    class Wrong:
        def __init__(self, said):
            self.said = said

        def __iter__(self):
            return iter([[0]] * 10)

        def __len__(self):
            return self.said

    for said in (14, 5, 0):
        assert len(list(FifoLoader(range(1), batch_sampler=Wrong(said), num_workers=0, progress=True))) == 10
        assert "10" in bar(capsys.readouterr().err)[0]


def test_an_empty_loader_closes_its_bar(capsys):
    assert list(FifoLoader([], num_workers=2, progress=True)) == []
    assert bar(capsys.readouterr().err)[1] == 1


def test_it_is_closed_on_break(capsys):
    for number, _ in enumerate(FifoLoader(range(100), num_workers=0, progress=True)):
        if number == 4:
            break
    line, lines = bar(capsys.readouterr().err)
    assert "5/100" in line
    assert lines == 1


class Broken:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return 1 / (index - 3)


def test_it_is_closed_on_error(capsys):
    with pytest.raises(ZeroDivisionError) as kept:  # whoever keeps the error does not keep the bar
        list(FifoLoader(Broken(), num_workers=0, progress=True))
    line, lines = bar(capsys.readouterr().err)
    assert "3/10" in line
    assert lines == 1
    assert kept.value.__notes__


def test_it_is_closed_on_an_interrupt(capsys):
    def interrupt(samples):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(FifoLoader(range(10), num_workers=0, progress=True, collate_fn=interrupt))
    assert bar(capsys.readouterr().err)[1] == 1


def test_it_shows_what_is_under_way_and_the_share_of_waiting(capsys):
    manual = ManualExecutor()
    batches = iter(FifoLoader(range(6), executor=manual, num_workers=2, window=3, progress={"mininterval": 0}))
    manual.complete(1)
    next(batches)
    assert re.search(r"1/6 .*, 3 under way, waited \d+%", bar(capsys.readouterr().err)[0])
    for number in (0, 2, 3, 4, 5):
        manual.complete(number)
        next(batches)
    assert re.search(r"6/6 .*, 0 under way, waited \d+%", bar(capsys.readouterr().err)[0])


def test_a_dict_gives_tqdms_arguments(capsys):
    file = io.StringIO()
    list(FifoLoader(range(3), num_workers=0, progress={"desc": "training", "file": file, "ascii": True}))
    assert "training: 100%|###" in file.getvalue()
    assert capsys.readouterr() == ("", "")
    list(FifoLoader(range(3), num_workers=0, progress={"disable": True}))
    assert capsys.readouterr() == ("", "")


def test_without_it_nothing_is_written(capsys):
    list(FifoLoader(range(3), num_workers=0))
    assert capsys.readouterr() == ("", "")
