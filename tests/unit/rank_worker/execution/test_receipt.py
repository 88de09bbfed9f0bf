"""Receipt digests: equal for equal histories, different for all others."""

from services.rank_worker.execution.receipt import DIGEST_BYTES, ReceiptChain

ROWS = [(0, 7, 12), (2, 9, 3)]


def test_ranks_with_equal_steps_have_equal_receipt_digests() -> None:
    """Ranks with equal steps have equal digests after every step."""
    ranks = [ReceiptChain(), ReceiptChain()]

    for step in range(3):
        first, second = (rank.add_step(b"plan%d" % step, ROWS, [1, 2], [0.5]) for rank in ranks)
        assert first == second
        assert len(first) == DIGEST_BYTES


def test_change_of_any_step_input_changes_receipt_digest() -> None:
    """Plan, rows, tokens, logits and their presence each change the digest."""
    digests = {
        ReceiptChain().add_step(b"plan", ROWS, [1, 2], [0.5, 1.5]),
        ReceiptChain().add_step(b"plaN", ROWS, [1, 2], [0.5, 1.5]),
        ReceiptChain().add_step(b"plan", ROWS[:1], [1, 2], [0.5, 1.5]),
        ReceiptChain().add_step(b"plan", [(0, 7, 12), (2, 9, 4)], [1, 2], [0.5, 1.5]),
        ReceiptChain().add_step(b"plan", [(0, 9, 12), (2, 7, 3)], [1, 2], [0.5, 1.5]),
        ReceiptChain().add_step(b"plan", ROWS, [2, 1], [0.5, 1.5]),
        ReceiptChain().add_step(b"plan", ROWS, [1, 2], [0.5, 1.5000001]),
        ReceiptChain().add_step(b"plan", ROWS, [1, 2], None),
    }

    assert len(digests) == 8


def test_rank_that_differed_once_never_has_equal_receipt_digest_again() -> None:
    """A rank that differed once never has the same digest again."""
    good, bad = ReceiptChain(), ReceiptChain()
    good.add_step(b"1", ROWS, [4], None)
    bad.add_step(b"1", ROWS, [5], None)

    assert good.add_step(b"2", ROWS, [6], None) != bad.add_step(b"2", ROWS, [6], None)


def test_receipt_digest_of_given_inputs_equals_frozen_value() -> None:
    """The digest of given inputs is the same in every version and on every machine."""
    digest = ReceiptChain().add_step(b"plan", ROWS, [1, 2], [0.5, -1.5])

    assert digest.hex() == "4de1d5df0f672093544f2973510f9ca4"
