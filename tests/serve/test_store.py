"""Runs within a bound of bytes."""

from dataclasses import dataclass

import pytest

from openbook.serve.errors import ApiError
from openbook.serve.store import Store


@dataclass
class Thing:
    id: str
    nbytes: int


def kept(store: Store[Thing]) -> list[str]:
    return [thing.id for thing in store]


def test_what_was_not_looked_at_for_longest_goes_first():
    store = Store[Thing](10)
    for name in "abc":
        store.put(Thing(name, 3))
    store.get("a")
    store.put(Thing("d", 3))
    assert kept(store) == ["c", "a", "d"]
    assert store.nbytes == 9


def test_room_is_made_before_the_work_begins_and_given_back_after_it():
    store = Store[Thing](10)
    store.put(Thing("a", 4))
    store.put(Thing("b", 4))
    with store.room(5, "work"):
        assert kept(store) == ["b"]
        store.put(Thing("c", 3))
        assert kept(store) == ["c"]
    store.put(Thing("d", 7))
    assert kept(store) == ["c", "d"]


def test_what_will_never_fit_is_refused_and_nothing_goes_for_it():
    store = Store[Thing](10)
    store.put(Thing("a", 4))
    with pytest.raises(ApiError, match="11 B, and the store holds 10 B") as refused, store.room(11, "work"):
        pass
    assert refused.value.status == 507
    assert kept(store) == ["a"]


def test_room_is_given_back_when_the_work_fails():
    store = Store[Thing](10)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), store.room(10, "work"):
            raise ZeroDivisionError
    with store.room(10, "work"):
        pass


def test_two_jobs_are_promised_no_more_than_there_is():
    store = Store[Thing](10)
    with store.room(6, "one"), pytest.raises(ApiError), store.room(5, "other"):
        pass


def test_a_thing_of_the_same_name_takes_the_place_of_the_old_one():
    store = Store[Thing](10)
    store.put(Thing("a", 6))
    store.put(Thing("a", 7))
    assert store.nbytes == 7
    assert store.remove("a")
    assert not store.remove("a")
    assert store.get("a") is None
