"""What float32 means is set for convolutions and for matrix products."""

import pytest
import torch

from backbench.parallel import precision

PLACES = (torch.backends.cudnn, torch.backends.cuda.matmul)


@pytest.fixture(params=[True, False])
def before(request):
    """Both places as a user may have left them; their own values come back."""
    own = [place.allow_tf32 for place in PLACES]
    for place in PLACES:
        place.allow_tf32 = request.param
    yield
    for place, value in zip(PLACES, own):
        place.allow_tf32 = value


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(
    ("name", "rounds"), [("tf32", True), ("fp32", False), ("bf16", False)]
)
def test_only_tf32_rounds_the_operands(name, rounds):
    precision.use(name)
    assert [place.allow_tf32 for place in PLACES] == [rounds, rounds]
