"""Seeds of noise: the same for the same step, apart for any two."""

from __future__ import annotations

import pytest

from lightning_memsave.saved_tensors.seeds import NoiseSeeds


def drawn(seed, step, num=5):
    seeds = NoiseSeeds(seed)
    seeds.begin(step)
    return [seeds.next_seed() for _ in range(num)]


def test_a_step_draws_the_same_whatever_came_before():
    resumed = NoiseSeeds(3)
    for step in (4, 9):
        resumed.begin(step)
        resumed.next_seed()
    resumed.begin(7)
    assert [resumed.next_seed() for _ in range(5)] == drawn(3, 7)


def test_seeds_steps_and_numbers_tell_apart():
    many = [seed for base in range(10) for step in range(20) for seed in drawn(base, step, 50)]
    # 10,000 of 2**32: the expected number of pairs that are equal by chance is 0.012.
    assert len(set(many)) == len(many) == 10_000
    assert all(0 <= seed < 2**32 for seed in many)


def test_bits_are_set_as_often_as_not():
    many = [seed for step in range(400) for seed in drawn(0, step, 10)]
    shares = [sum(seed >> bit & 1 for seed in many) / len(many) for bit in range(32)]
    assert max(abs(share - 0.5) for share in shares) < 5 * 0.5 / len(many) ** 0.5


def test_the_second_part_of_a_step_goes_on():
    seeds = NoiseSeeds(0)
    seeds.begin(2)
    first = [seeds.next_seed(), seeds.next_seed()]
    seeds.begin(2)  # another microbatch
    assert [*first, seeds.next_seed()] == drawn(0, 2, 3)


def test_a_try_that_is_made_again_draws_the_same():
    seeds = NoiseSeeds(0)
    seeds.begin(2)
    seeds.next_seed()
    place = seeds.place
    first = [seeds.next_seed() for _ in range(3)]
    seeds.begin(5)
    seeds.go_to(place)
    assert seeds.place == place
    assert [seeds.next_seed() for _ in range(3)] == first


def test_streams_do_not_depend_on_each_other():
    one, other = NoiseSeeds(0), NoiseSeeds(0)
    found = [one.next_seed(stream) for stream in (1, 2, 1, 0, 2)]
    again = [other.next_seed(stream) for stream in (2, 0, 1, 1, 2)]
    assert found == [again[2], again[0], again[3], again[1], again[4]]
    assert len(set(found)) == 5


@pytest.mark.parametrize("large", [2**32, 2**40, -1])
def test_seeds_and_steps_of_any_size_are_taken(large):
    assert all(0 <= seed < 2**32 for seed in drawn(large, abs(large)))
    assert len(set(drawn(large, abs(large), 100))) == 100
