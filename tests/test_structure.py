"""The house: how many rooms there are, and how large a room, a file and a function may be."""

from __future__ import annotations

from structure import figures


def test_rooms_and_files_stay_small() -> None:
    house = figures()
    assert house.rooms <= 33
    assert house.files_of_the_largest_room[0] <= 16, house.files_of_the_largest_room
    assert not house.rooms_in_a_cycle
    assert not house.long_files
    assert house.longest_function[0] <= 60, house.longest_function
