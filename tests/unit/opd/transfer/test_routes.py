"""Every process of every engine has one way for its weights, and no two of the broadcasting group are on one GPU."""

from __future__ import annotations

import pytest

from opd.errors import RunError
from opd.models.buckets import BucketSlot
from opd.transfer.routes import PushPlan, Route, plan_routes


def test_on_cpus_every_process_is_in_the_group_at_an_offset_of_its_own() -> None:
    assert plan_routes(["", ""], [[""], ["", ""]]) == [
        [Route(process=0, group_rank=1)],
        [Route(process=1, group_rank=2), Route(process=2, group_rank=3)],
    ]


def test_engines_on_gpus_of_their_own_are_in_the_group() -> None:
    assert plan_routes(["gpu 0", "gpu 1"], [["gpu 2", "gpu 3"]]) == [
        [Route(process=0, group_rank=1), Route(process=1, group_rank=2)]
    ]


def test_a_process_on_a_ranks_gpu_reads_that_ranks_memory() -> None:
    """Rank and engine side by side on each GPU, and one engine on a GPU without a rank."""
    assert plan_routes(["gpu 0", "gpu 1"], [["gpu 0"], ["gpu 1"], ["gpu 2"]]) == [
        [Route(process=0, trainer_rank=0)],
        [Route(process=1, trainer_rank=1)],
        [Route(process=2, group_rank=1)],
    ]
    assert plan_routes(["gpu 0"], [["gpu 0"], ["gpu 0"]]) == [
        [Route(process=0, trainer_rank=0)],
        [Route(process=1, trainer_rank=0)],
    ]


def test_two_processes_of_the_group_on_one_gpu_are_refused() -> None:
    with pytest.raises(RunError, match=r"^sync\.kind direct: two processes .* set sync\.kind to network$"):
        plan_routes(["gpu 0"], [["gpu 1"], ["gpu 1"]])


def test_the_size_of_a_bucket_is_that_of_its_tensors_with_padding() -> None:
    slots = (BucketSlot("a", "bfloat16", (3,), 0), BucketSlot("b", "float32", (16, 1), 64))
    assert PushPlan(whole=True, buckets=(slots, slots[:1])).sizes == [128, 64]
