"""Row state and persistent batch: what a delta may touch, and what it may not."""

import numpy as np
import pytest
import torch

from protocol.messages import BlockGrants, Chunk, RowJoin, StepDelta, pack
from protocol.sampling import RowSampling
from worker.batch import PersistentBatch, bucket_for
from worker.rows import RowState, SamplingKind, sampling_kind
from worker.staging import HostStaging

SCRATCH_BLOCK = 50


def make_batch(num_rows: int = 16) -> PersistentBatch:
    rows = RowState(num_rows, max_blocks=6, scratch_block=SCRATCH_BLOCK, device=torch.device("cpu"))
    return PersistentBatch(rows, max_tokens=64, staging=HostStaging())


def join(row: int, blocks: list[int], sampling: RowSampling = RowSampling()) -> RowJoin:
    return RowJoin(row, row + 1, 3, 0, pack(blocks), sampling)


def columns(rows: RowState) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(rows).items() if isinstance(value, torch.Tensor) and name[0] != "_"}


def test_a_join_leaves_nothing_of_the_last_owner():
    batch = make_batch()
    rough = RowSampling(temperature=0.5, top_k=7, top_p=0.5, min_p=0.25, seed=99)
    batch.apply(StepDelta(0, joins=[join(3, [1, 2, 3, 4], rough)], chunks=[Chunk(3, pack([5]), True)]))
    batch.rows.last_token_R[3], batch.rows.length_R[3] = 77, 40
    batch.apply(StepDelta(1, joins=[join(3, [9])], chunks=[Chunk(3, pack([6]), True)]))
    fresh = make_batch()
    fresh.apply(StepDelta(0, joins=[join(3, [9])], chunks=[Chunk(3, pack([6]), True)]))
    for name, column in columns(batch.rows).items():
        assert torch.equal(column, columns(fresh.rows)[name]), name
    assert batch.rows.kind_R[3] == SamplingKind.GREEDY


def test_a_join_touches_no_other_row():
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(row, [row], RowSampling(0.5, seed=row)) for row in range(5)], chunks=[Chunk(0, pack([5]), True)]))
    before = {name: column.clone() for name, column in columns(batch.rows).items()}
    batch.apply(StepDelta(1, joins=[join(2, [30])], chunks=[Chunk(2, pack([5]), True)]))
    others = torch.arange(17) != 2
    assert all(torch.equal(column[others], before[name][others]) for name, column in columns(batch.rows).items())


def test_a_grant_goes_behind_the_blocks_that_a_row_holds():
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(1, [7, 8]), join(2, [9])], chunks=[Chunk(1, pack([5]), True)]))
    batch.apply(StepDelta(1, grants=BlockGrants(pack([1, 2, 2]), pack([2, 1, 2]), pack([20, 21, 22])), decode_on=[1]))
    table = batch.rows.block_table_RB
    assert table[1].tolist() == [7, 8, 20, SCRATCH_BLOCK, SCRATCH_BLOCK, SCRATCH_BLOCK]
    assert table[2].tolist() == [9, 21, 22, SCRATCH_BLOCK, SCRATCH_BLOCK, SCRATCH_BLOCK]


def test_a_steady_step_is_the_same_object_untouched():
    batch = make_batch()
    first = batch.apply(StepDelta(0, joins=[join(0, [1])], chunks=[Chunk(0, pack([5]), True)]))
    assert not first.is_decode
    second = batch.apply(StepDelta(1, decode_on=[0]))
    assert second.is_decode and batch.apply(StepDelta(2)) is second is batch.apply(StepDelta(3))


def test_padding_points_at_the_scratch_row():
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(row, [row]) for row in range(13)], chunks=[Chunk(0, pack([5]), True)]))
    step = batch.apply(StepDelta(1, decode_on=list(range(13))))
    assert step.rows_S.tolist() == [*range(13), 16, 16, 16]
    assert step.counts_S.tolist() == [1] * 13 + [0] * 3
    assert step.num_results == 13


def test_a_mixed_step_runs_decoding_rows_then_chunks_in_order():
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(row, [row]) for row in range(4)], chunks=[Chunk(3, pack([5]), True)]))
    step = batch.apply(StepDelta(1, decode_on=[3], chunks=[Chunk(2, pack([10, 11, 12]), False), Chunk(0, pack([20, 21]), True)]))
    assert step.rows_T.tolist() == [3, 2, 2, 2, 0, 0]
    assert step.known_tokens_T.tolist() == [-1, 10, 11, 12, 20, 21]
    assert step.offsets_T.tolist() == [0, 0, 1, 2, 0, 1]
    assert step.query_start_S1.tolist() == [0, 1, 4, 6]
    assert step.sample_index_N.tolist() == [0, 5] and step.sample_rows_N.tolist() == [3, 0]


def test_a_lost_delta_is_an_error():
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(0, [1])], chunks=[Chunk(0, pack([5]), True)]))
    with pytest.raises(RuntimeError, match="step 2 arrived, expected step 1"):
        batch.apply(StepDelta(2))


def test_buckets_are_1_2_4_8_then_steps_of_8():
    assert sorted({bucket_for(count, 40) for count in range(1, 41)}) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert all(bucket_for(count, 40) >= count for count in range(1, 41))
    assert bucket_for(13, 40) == 16 and bucket_for(13, 14) == 14


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (RowSampling(), SamplingKind.GREEDY),
        (RowSampling(temperature=0.0, top_k=5, top_p=0.1, seed=3), SamplingKind.GREEDY),
        (RowSampling(temperature=0.7), SamplingKind.RANDOM),
        (RowSampling(temperature=0.7, top_k=3), SamplingKind.FILTERED),
        (RowSampling(temperature=0.7, top_p=0.9), SamplingKind.FILTERED),
        (RowSampling(temperature=0.7, min_p=0.1), SamplingKind.FILTERED),
    ],
)
def test_a_step_takes_the_costliest_kind_of_its_rows(sampling, kind):
    assert sampling_kind(sampling) is kind
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(0, [1]), join(1, [2], sampling)], chunks=[Chunk(0, pack([5]), True)]))
    assert batch.apply(StepDelta(1, decode_on=[0, 1])).kind is kind
    assert batch.apply(StepDelta(2, decode_off=[1])).kind is SamplingKind.GREEDY


def test_warming_up_changes_no_row():
    batch = make_batch()
    batch.apply(StepDelta(0, joins=[join(0, [1])], chunks=[Chunk(0, pack([5]), True)]))
    before = {name: column.clone() for name, column in columns(batch.rows).items()}
    step = batch.padding_step(9, 4)
    assert set(step.rows_T.tolist()) == {16} and int(step.query_start_S1[-1]) == 9
    assert all(torch.equal(column, before[name]) for name, column in columns(batch.rows).items())
    assert np.isin(step.sample_rows_N.numpy(), 16).all()
