"""The order of images is decided by the seed and the place in the run alone."""

from detection.data.order import ImageOrder, Slots


def test_order_is_a_function_of_its_position():
    records = [{"width": 2 if i % 3 else 1, "height": 1 + i % 3 % 2} for i in range(23)]
    order = ImageOrder(records, 8, seed=4)
    stream = order.batches()
    whole = [next(stream) for _ in range(20)]
    later = order.batches(13)
    assert [next(later) for _ in range(7)] == whole[13:]
    for batch in whole:
        for group in (batch[:4], batch[4:]):
            assert len({order.wide[i] for i in group}) == 1
    seen = [i for batch in whole for i in batch]
    assert set(seen[:46]) == set(range(23))
    shares = [list(Slots(order, first=3, last=6, rank=r, world=2)) for r in range(2)]
    assert [[i for _, _, i in a + b] for a, b in zip(*shares)] == whole[3:6]
