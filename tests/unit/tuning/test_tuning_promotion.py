"""Successive halving by promotion: which trials wait, and which are promoted."""

from app.tuning.promotion import Promotion


def test_a_trial_waits_until_it_is_among_the_best_of_its_rung() -> None:
    promotion = Promotion(epochs=9, grace=1, factor=3, mode="max")
    assert [promotion.goes_on(number, 1, value) for number, value in enumerate((0.1, 0.9, 0.5))] == [False] * 3
    assert promotion.promote() == 1
    assert promotion.promote() is None
    assert promotion.goes_on(1, 2, 0.9)
    assert not promotion.goes_on(1, 3, 0.9)
    assert [promotion.goes_on(number, 1, 0.0) for number in (3, 4)] == [False] * 2
    assert promotion.goes_on(5, 1, 1.0)  # the best of six, of whom two go on


def test_when_nobody_else_comes_the_best_goes_on_to_its_end() -> None:
    promotion = Promotion(epochs=9, grace=1, factor=3, mode="min")
    assert not promotion.goes_on(0, 1, 0.5)
    assert not promotion.goes_on(1, 1, 0.4)
    assert promotion.promote() is None
    assert promotion.promote(at_least=1) == 1
    assert not promotion.goes_on(1, 3, 0.3)
    assert promotion.promote(at_least=1) == 1
    assert [promotion.goes_on(1, epoch, 0.2) for epoch in range(4, 10)] == [True] * 6
    assert promotion.promote(at_least=1) is None


def test_a_trial_that_failed_takes_nobodys_place() -> None:
    promotion = Promotion(epochs=9, grace=1, factor=2, mode="max")
    promotion.goes_on(0, 1, 0.9)
    promotion.goes_on(1, 1, 0.8)
    promotion.drop(0)
    assert promotion.promote(at_least=1) == 1


def test_a_trial_that_failed_is_promoted_anew_if_at_all() -> None:
    promotion = Promotion(epochs=9, grace=1, factor=2, mode="max")
    promotion.goes_on(0, 1, 0.5)
    assert promotion.goes_on(1, 1, 0.9)
    promotion.drop(1)
    assert not promotion.goes_on(1, 1, 0.1)


def test_what_was_known_before_is_known_again() -> None:
    promotion = Promotion(epochs=9, grace=1, factor=3, mode="max")
    promotion.recall(0, {1: 0.9, 2: 0.9, 3: 0.9}, is_paused=True)
    promotion.recall(1, {1: 0.8}, is_paused=True)
    promotion.recall(2, {1: 0.7}, is_paused=True)
    assert promotion.promote() is None  # the best waits at the second rung, with nobody beside it
    assert not promotion.goes_on(3, 1, 0.1)
    assert promotion.promote(at_least=1) == 0


def test_few_epochs_have_no_rungs() -> None:
    assert Promotion(epochs=1, grace=1, factor=3, mode="max").goes_on(0, 1, 0.0)
