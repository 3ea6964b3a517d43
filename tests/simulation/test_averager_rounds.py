"""Rounds of real averagers in virtual time: values, roles, weights, shapes and dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch

from swarmavg import AllreduceError, MatchmakingError
from swarmavg.compression import Float16Compression
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm

MIXES = [
    ["client"] * clients + ["auxiliary"] * auxiliaries + ["node"] * (4 - clients - auxiliaries)
    for clients, auxiliaries in itertools.product(range(3), range(3))
]


def randoms(seed, shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


def weighted_mean(each, weights, index):
    total = sum(weights)
    return sum(w * tensors[index].double() for w, tensors in zip(weights, each, strict=True)) / total


def identical(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("roles", MIXES, ids=lambda roles: "-".join(role[0] for role in roles))
def test_every_mix_of_roles_reaches_the_weighted_mean(roles):
    shapes = [(1000,), (7, 11), (), (0,), (1,), (997,)]
    weights = [0.5, 2.0, 1.25, 3.0]

    async def main():
        each = [randoms(seed, shapes) for seed in range(4)]
        before = [clones(tensors) for tensors in each]
        async with SimulatedSwarm(seed=len(roles)) as swarm:
            averagers = await swarm.averagers(each, roles=roles, target_group_size=4, part_size_bytes=512)
            given = [None if role == "auxiliary" else weight for role, weight in zip(roles, weights, strict=True)]
            results = await swarm.step_all(averagers, weights=given, gather="hello")
            ids = {averager.peer_id for averager in averagers}
        contributing = [index for index, role in enumerate(roles) if role != "auxiliary"]
        for index, role in enumerate(roles):
            assert set(results[index]) == ids
            assert set(results[index].values()) == {"hello"}
            assert results[index].round_id == results[0].round_id
            assert results[index].excluded == {}
            if role == "auxiliary":
                assert identical(each[index], before[index])
                continue
            assert results[index].fraction == 1.0
            assert results[index].missing == []
            assert identical(each[index], each[contributing[0]])
            for number in range(len(shapes)):
                expected = weighted_mean([before[i] for i in contributing], [weights[i] for i in contributing], number)
                torch.testing.assert_close(each[index][number].double(), expected, rtol=1e-6, atol=1e-6)
            (span, members), *rest = results[index].contributors
            assert not rest
            assert (span.start, span.stop) == (0, averagers[index].total_size)
            assert set(members) == {averagers[i].peer_id for i in contributing}

    run_virtual(main)


def test_a_group_of_auxiliaries_ends_at_once():
    async def main():
        each = [randoms(seed, [(10,)]) for seed in range(3)]
        before = [clones(tensors) for tensors in each]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, roles=["auxiliary"] * 3, target_group_size=3)
            results = await swarm.step_all(averagers, gather=[1, {"a": 2}])
            expected = {averager.peer_id: [1, {"a": 2}] for averager in averagers}
            assert all(dict(result) == expected for result in results)
        assert all(identical(now, then) for now, then in zip(each, before, strict=True))

    run_virtual(main)


@pytest.mark.parametrize("weights", [[0.0, 1.0, 2.0], [0.0, 0.0, 1.0], [1e-18, 1.0, 1e18]], ids=str)
def test_a_weight_of_zero_receives_and_contributes_nothing(weights):
    async def main():
        each = [randoms(seed, [(501,)]) for seed in range(3)]
        before = [clones(tensors) for tensors in each]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=256)
            await swarm.step_all(averagers, weights=weights)
        for tensors in each:
            torch.testing.assert_close(tensors[0].double(), weighted_mean(before, weights, 0), rtol=1e-6, atol=1e-6)
        assert identical(each[0], each[1])
        assert identical(each[0], each[2])

    run_virtual(main)


def test_a_group_whose_weights_are_all_zero_changes_nothing():
    async def main():
        each = [randoms(seed, [(100,)]) for seed in range(3)]
        before = [clones(tensors) for tensors in each]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3)
            results = await swarm.step_all(averagers, weights=[0.0] * 3)
        assert [result.fraction for result in results] == [0.0] * 3
        assert [result.missing for result in results] == [[]] * 3
        assert all(identical(now, then) for now, then in zip(each, before, strict=True))

    run_virtual(main)


@pytest.mark.parametrize("compression", [None, Float16Compression()], ids=["lossless", "float16"])
def test_dtypes_mix_in_one_averager_and_members_agree_bit_for_bit(compression):
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float32]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}

    async def main():
        each = [[randoms(seed * 10 + i, [(101,)], dtype)[0] for i, dtype in enumerate(dtypes)] for seed in range(3)]
        before = [clones(tensors) for tensors in each]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=128, compression=compression)
            await swarm.step_all(averagers)
        assert identical(each[0], each[1])
        assert identical(each[0], each[2])
        for index, dtype in enumerate(dtypes):
            bound = tolerance[dtype] if compression is None else max(tolerance[dtype], 2e-3)
            expected = weighted_mean(before, [1.0] * 3, index)
            torch.testing.assert_close(each[0][index].double(), expected, rtol=bound, atol=bound)

    run_virtual(main)


def test_float64_is_averaged_in_float64():
    async def main():
        each = [[torch.tensor([1.0 + value * 2.0**-40], dtype=torch.float64)] for value in (0, 2)]
        async with SimulatedSwarm() as swarm:
            await swarm.step_all(await swarm.averagers(each, target_group_size=2))
        assert each[0][0].item() == each[1][0].item() == 1.0 + 2.0**-40

    run_virtual(main)


def test_non_contiguous_tensors_and_views_are_averaged_in_place():
    async def main():
        bases = [torch.full((6, 10), float(value)) for value in (1, 3)]
        each = [[base.t()[::2], base[:, 1::2]] for base in bases]  # disjoint columns of one storage
        async with SimulatedSwarm() as swarm:
            await swarm.step_all(await swarm.averagers(each, target_group_size=2, part_size_bytes=64))
        assert all(base.eq(2.0).all() for base in bases)

    run_virtual(main)


def test_five_thousand_small_tensors():
    async def main():
        each = [[torch.full((10,), float(seed + index)) for index in range(5000)] for seed in (0, 2)]
        async with SimulatedSwarm() as swarm:
            await swarm.step_all(await swarm.averagers(each, target_group_size=2))
        assert all(tensor.eq(index + 1.0).all() for index, tensor in enumerate(each[0]))
        assert identical(each[0], each[1])

    run_virtual(main)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_alpha_moves_towards_the_average(alpha):
    async def main():
        each = [[torch.full((100,), value)] for value in (0.0, 8.0)]
        async with SimulatedSwarm() as swarm:
            await swarm.step_all(await swarm.averagers(each, target_group_size=2, averaging_alpha=alpha))
        assert each[0][0].eq(4.0 * alpha).all()
        assert each[1][0].eq(8.0 - 4.0 * alpha).all()

    run_virtual(main)


def test_parameters_that_require_grad_are_averaged_without_a_trace():
    async def main():
        each = [[torch.nn.Parameter(torch.full((10,), value))] for value in (1.0, 3.0)]
        async with SimulatedSwarm() as swarm:
            await swarm.step_all(await swarm.averagers(each, target_group_size=2))
        for (parameter,) in each:
            assert parameter.eq(2.0).all()
            assert parameter.is_leaf
            assert parameter.grad_fn is None

    run_virtual(main)


def test_bandwidths_shape_the_shares_and_zero_leaves_the_reducing_to_others():
    async def main():
        each = [randoms(seed, [(4000,)]) for seed in range(3)]
        async with SimulatedSwarm() as swarm:
            averagers = [
                await swarm.averager(tensors, target_group_size=3, bandwidth=bandwidth)
                for tensors, bandwidth in zip(each, [0.0, 10.0, 10.0], strict=True)
            ]
            results = await swarm.step_all(averagers)
            # the first one reduces nothing: it sends its whole vector once and receives the average once
            assert results[0].bytes_sent == results[0].bytes_received == 4000 * 4
        assert identical(each[0], each[1])
        assert identical(each[0], each[2])

    run_virtual(main)


def test_a_group_that_nobody_can_reduce_for_fails_with_the_reason():
    async def main():
        each = [randoms(seed, [(10,)]) for seed in range(2)]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=2, bandwidth=0.0)
            with pytest.raises(MatchmakingError, match="bandwidth"):
                await swarm.step_all(averagers, timeout=4.0)

    run_virtual(main)


def test_repeated_rounds_reuse_everything_and_stay_right():
    async def main():
        each = [randoms(seed, [(3000,)]) for seed in range(4)]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=4, part_size_bytes=1024)
            for number in range(10):
                for seed, tensors in enumerate(each):
                    tensors[0].copy_(randoms(100 * number + seed, [(3000,)])[0])
                before = [clones(tensors) for tensors in each]
                await swarm.step_all(averagers)
                expected = weighted_mean(before, [1.0] * 4, 0)
                for tensors in each:
                    torch.testing.assert_close(tensors[0].double(), expected, rtol=1e-6, atol=1e-6)
                assert all(identical(each[0], tensors) for tensors in each)

    run_virtual(main)


def test_the_peer_counts_its_rounds():
    async def main():
        each = [randoms(seed, [(3000,)]) for seed in range(2)]
        async with SimulatedSwarm(bandwidth=1e6) as swarm:
            first, second = await swarm.averagers(each, target_group_size=2, allreduce_timeout=1.0)
            assert first.peer.status()["rounds"]["run"]["finished"] == 0
            for _ in range(3):
                await swarm.step_all([first, second])
            waiting = await second.step(wait=False, require_trigger=True)
            with pytest.raises(AllreduceError):
                await first.step(allow_retries=False)
            waiting.cancel()
            status = first.peer.status()
            rounds = status["rounds"]["run"]
            assert (rounds["finished"], rounds["failed"]) == (3, 1)
            assert rounds["bytes_received"] == 3 * 3000 * 4
            assert 0 < rounds["bytes_sent"] <= 3 * 3000 * 4  # the last results may still be on their way to the other
            assert (rounds["last_group_size"], rounds["last_fraction"]) == (2, 1.0)
            assert 0 < status["rates"]["sent"] < 1e6
            assert status["rates"]["received"] > 0

    run_virtual(main)
