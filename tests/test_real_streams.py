"""Others' iterable datasets: Hugging Face's and webdataset's. They split themselves; each sample has to come once.

Needs the extra ``streams`` (pip install -e ".[test,streams]"), of some 300 MB. Slow: each worker imports Hugging Face's
package by itself, as that starts threads.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fifobatch import FifoLoader

SAMPLES, SHARDS = 40, 4

# What these packages do themselves under `filterwarnings = error`; workers have the same filters.
pytestmark = [
    pytest.mark.slow,
    # Hugging Face's package starts threads when it is imported.
    pytest.mark.filterwarnings("ignore:importing .* starts a thread:RuntimeWarning"),
    # webdataset leaves its files to the collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed file:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(datasets|webdataset|huggingface_hub|pyarrow|multiprocess)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(datasets|webdataset|huggingface_hub|pyarrow)"),
]


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have Hugging Face ask nobody, and keep its caches here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    """Yield the samples of some shards, as ``Dataset.from_generator`` calls it."""
    for shard in shards:
        for number in range(shard, SAMPLES, SHARDS):
            yield {"number": number}


def of_parquet(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    for shard in range(SHARDS):
        table = pyarrow.table({"number": list(range(shard, SAMPLES, SHARDS))})
        pyarrow.parquet.write_table(table, folder / f"{shard}.parquet")
    files = {"train": [str(folder / f"{shard}.parquet") for shard in range(SHARDS)]}
    return datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )


def of_generator(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(range(SHARDS))})


def of_tar_files(folder: Path) -> Any:
    webdataset = pytest.importorskip("webdataset")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, SAMPLES, SHARDS):
                text = str(number).encode()
                member = tarfile.TarInfo(f"{number:04}.number.cls")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    urls = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    return dataset.decode().to_tuple("number.cls").map(first)


def first(sample: tuple[int, ...]) -> dict[str, int]:
    return {"number": sample[0]}


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("make", [of_generator, of_parquet, of_tar_files])
def test_each_sample_comes_once(make: Any, num_workers: int, tmp_path: Path) -> None:
    loader = FifoLoader(make(tmp_path), batch_size=4, num_workers=num_workers)
    for _ in range(2):
        assert sorted(int(number) for batch in loader for number in batch["number"]) == list(range(SAMPLES))


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_of_a_shuffled_hugging_face_stream_has_its_own_order(persistent: bool, tmp_path: Path) -> None:
    dataset = of_generator(tmp_path).shuffle(seed=1, buffer_size=10)
    orders = []
    with FifoLoader(dataset, batch_size=4, num_workers=2, in_order=True, persistent_workers=persistent) as loader:
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            orders.append([int(number) for batch in loader for number in batch["number"]])
    assert [sorted(order) for order in orders] == [list(range(SAMPLES))] * 3
    assert orders[0] == orders[2] != orders[1]


def test_a_hugging_face_stream_becomes_tensors(tmp_path: Path) -> None:
    loader = FifoLoader(of_generator(tmp_path).with_format("torch"), batch_size=5, num_workers=2)
    batches = list(loader)
    assert all(isinstance(batch["number"], torch.Tensor) for batch in batches)
    assert sum(len(batch["number"]) for batch in batches) == SAMPLES
    assert os.environ["HF_HUB_OFFLINE"] == "1"
