"""How a batch and its batch norms divide over processes, and what does not divide."""

import pytest
import torch
from torch import nn

from backbench.errors import BadInput
from backbench.parallel import batchnorm, division, gpus


@pytest.mark.parametrize(
    ("batch", "ranks", "accumulate", "nearest"),
    [
        (256, 8, 4, None),
        (4, 4, 1, None),
        (100, 3, 4, 96),
        (106, 3, 4, 108),
        (5, 4, 3, 12),  # never 0
        (30, 12, 1, 24),
    ],
)
def test_a_batch_gives_each_process_equally_many_images(
    batch, ranks, accumulate, nearest
):
    if nearest is None:
        division.check_batch(batch, ranks, accumulate)
        return
    with pytest.raises(BadInput) as refused:
        division.check_batch(batch, ranks, accumulate)
    assert str(refused.value) == (
        f"batch_size {batch} does not divide over {ranks} processes x {accumulate} accumulation"
        f" steps; the nearest that does is {nearest}"
    )


def test_there_is_a_process():
    with pytest.raises(BadInput, match=r"^0 processes in all: --devices and --nodes"):
        division.check_batch(4, 0, 1)
    division.check_batch(4, 1, 1)


@pytest.mark.parametrize(
    ("groups", "ranks", "start"),
    [
        (8, 4, None),
        (4, 8, None),
        (3, 3, None),
        (8, 5, "4 or 8"),
        (4, 6, "4 or 8"),
        (4, 11, "8 or 12"),
        (6, 4, "3 or 6"),
    ],
)
def test_groups_and_processes_hold_one_another_whole(groups, ranks, start):
    if start is None:
        division.check_nesting(groups, ranks)
        return
    with pytest.raises(BadInput) as refused:
        division.check_nesting(groups, ranks)
    said = str(refused.value)
    assert said.startswith(
        f"{groups} batch norm groups and {ranks} processes do not nest:"
    )
    assert f"; start {start} processes (--devices times --nodes)" in said


def test_groups_divide_the_images_of_a_pass():
    for groups in (None, 1, 3, 12):
        division.check_groups(groups, 12)
    for groups in (0, -3, 5, 24):
        with pytest.raises(
            BadInput, match=f"^{groups} batch norm groups do not divide the 12"
        ):
            division.check_groups(groups, 12)


def images(count=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 4, 5, generator=generator, dtype=torch.float64) * 2 + 5


def group_norm(groups, **options):
    layer = nn.BatchNorm2d(3, momentum=0.3, **options).double()
    return batchnorm.convert_group_batchnorm(layer, groups)


def test_running_statistics_are_the_mean_of_what_each_group_would_keep():
    x = images()
    layer = group_norm(3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        layer.bias.copy_(torch.tensor([0.5, 0.0, -0.5]))
    out = layer(x)
    parts = x.numpy().reshape(3, 2, 3, 4, 5)
    mean = parts.mean((1, 3, 4))
    variance = parts.var((1, 3, 4))
    normed = (parts - mean[:, None, :, None, None]) / (
        variance[:, None, :, None, None] + 1e-5
    ) ** 0.5
    weight, bias = (
        value.detach().view(1, 3, 1, 1) for value in (layer.weight, layer.bias)
    )
    wanted = torch.from_numpy(normed.reshape(6, 3, 4, 5)) * weight + bias
    torch.testing.assert_close(out.detach(), wanted)
    # Of 2 x 4 x 5 values, the unbiased variance
    unbiased = torch.from_numpy(variance * 40 / 39).mean(0)
    torch.testing.assert_close(layer.running_mean, 0.3 * torch.from_numpy(mean).mean(0))
    torch.testing.assert_close(layer.running_var, 0.7 + 0.3 * unbiased)
    assert layer.num_batches_tracked == 1
    # Used as one wherever it is no training
    layer.eval()
    plain = nn.BatchNorm2d(3).double().eval()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))


def test_groups_without_statistics_or_weights():
    x = images()
    layer = group_norm(2, affine=False, track_running_stats=False)
    halves = [nn.BatchNorm2d(3, affine=False).double()(half) for half in x.chunk(2)]
    torch.testing.assert_close(layer(x), torch.cat(halves))
    assert layer.running_mean is None and layer.num_batches_tracked is None


def test_samples_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(BadInput) as refused:
        group_norm(4)(images())
    assert str(refused.value).startswith(
        "6 samples at a time do not divide into the 4 batch norm groups of a process;"
    )


def test_the_numbers_of_groups_are_told():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(3)))
    assert batchnorm.groups_of(model) == set()
    model = batchnorm.convert_group_batchnorm(model, 4)
    assert batchnorm.groups_of(model) == {4}
    model[0].groups = None
    assert batchnorm.groups_of(model) == {4, None}
    # Already converted layers are kept, with their new number
    assert batchnorm.convert_group_batchnorm(model, 2)[0] is model[0]
    assert batchnorm.groups_of(model) == {2}


def test_a_converted_norm_has_the_numbers_of_the_first():
    plain = nn.BatchNorm2d(3, eps=0.1, momentum=0.2, affine=True).eval()
    for made in (
        batchnorm.convert_sync_batchnorm(plain),
        batchnorm.convert_group_batchnorm(plain, 2),
    ):
        assert (made.num_features, made.eps, made.momentum) == (3, 0.1, 0.2)
        assert made.weight is plain.weight and made.running_var is plain.running_var
        assert not made.training
    bare = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    made = batchnorm.convert_sync_batchnorm(bare)
    assert (made.affine, made.track_running_stats, made.training) == (
        False,
        False,
        True,
    )


def test_several_gpus_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus.refuse_missing("cuda", 2)
    with pytest.raises(BadInput) as refused:
        gpus.refuse_missing("cuda", 3)
    assert str(refused.value) == (
        "--devices 3: torch finds 2 GPUs here; use --devices 2, or see `backbench doctor`"
    )
