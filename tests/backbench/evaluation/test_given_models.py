"""What is given as a model becomes a checkpoint: once, under its name, in its file."""

import pytest
import torch

from backbench.errors import BadInput
from backbench.evaluation import models
from backbench.images.preprocess import Pixels
from backbench.weights import archs
from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


def a_checkpoint(seed=0, **about):
    torch.manual_seed(seed)
    state = archs.build_trunk(VIT).state_dict()
    return Checkpoint(arch=VIT, method="random", state_dict=state, **about)


def test_equal_weights_are_measured_once_and_all_others_are(caplog):
    one, other = (
        a_checkpoint(seed, provenance={"name": f"n{seed}"}) for seed in (0, 1)
    )
    found = models.read_models([one, one, other, one], method="mine", epochs=3)
    assert [point.digest for point in found] == [one.digest, other.digest]
    assert [point.name for point in found] == ["n0", "n1"]
    assert {(point.method, point.epochs) for point in found} == {("mine", 3)}
    assert caplog.text.count("the same weights as n0; measured once") == 2
    # A single one need not be in a list, and an empty name is none
    (alone,) = models.read_models(other, name="")
    assert (alone.name, alone.method) == ("n1", "random")
    (named,) = models.read_models((other,), name="x")
    assert named.name == "x"


def test_a_text_is_one_model(tmp_path):
    file = tmp_path / "x.safetensors"
    a_checkpoint().save(file)
    for given in (str(file), file, [str(file)]):
        (found,) = models.read_models(given)
        assert found.digest == a_checkpoint().digest


def test_pixels_that_are_given_are_nobodys_guess(caplog):
    caplog.set_level("INFO", "backbench")
    guessed = {PIXELS_FROM: "taken are ImageNet's", "name": "x", "source": "there"}
    point = a_checkpoint(provenance=guessed)
    assert models.checkpoint_of(point, None, None) is point
    assert "x: taken are ImageNet's" in caplog.messages
    caplog.clear()
    grey = Pixels((0.5,) * 3, (0.25,) * 3)
    found = models.checkpoint_of(point, None, grey)
    assert found.pixels == grey and caplog.messages == []
    assert found.provenance == {"name": "x", "source": "there"}


def test_a_module_is_named_and_read_as_a_file_of_its_weights():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = archs.build_trunk("resnet18")

    module = Wrapped()
    found = models.checkpoint_of(module, None, None)
    assert (found.name, found.method) == ("Wrapped", "module")
    assert found.provenance["source"].startswith("module ")
    assert found.provenance["source"].endswith("Wrapped")
    assert torch.equal(found.state_dict["conv1.weight"], module.encoder.conv1.weight)
    # What is wrapped around a module is no part of it
    compiled = torch.nn.Module()  # as torch.compile's, which takes seconds to load
    compiled._orig_mod = torch.nn.DataParallel(module)
    for wrapped in (torch.nn.DataParallel(module), compiled):
        same = models.checkpoint_of(wrapped, None, None)
        assert (same.name, same.digest) == ("Wrapped", found.digest)
    said = r"^module .*Linear: .* is given as backbench\.ModuleTrunk$"
    with pytest.raises(BadInput, match=said) as error:
        models.checkpoint_of(torch.nn.Linear(2, 2), None, None)
    assert "module.pt" not in str(error.value)
    with pytest.raises(BadInput, match=r"not dict; load a state dict into its module"):
        models.checkpoint_of({}, None, None)


def test_weights_lie_in_a_file_of_their_own(tmp_path):
    one, other = a_checkpoint(0), a_checkpoint(1)
    plain = tmp_path / "checkpoint.safetensors"
    marked = {
        p.digest: tmp_path / f"checkpoint-{p.digest[:12]}.safetensors"
        for p in (one, other)
    }
    assert models.file_in(tmp_path, one, alone=True) == plain
    assert models.file_in(tmp_path, one, alone=False) == marked[one.digest]
    one.save(plain)
    assert models.file_in(tmp_path, one, alone=True) == plain
    assert models.file_in(tmp_path, other, alone=True) == marked[other.digest]
    # A file that holds others than it is named by
    one.save(marked[other.digest])
    said = f"{marked[other.digest]}: holds other weights than its name says; remove it"
    with pytest.raises(BadInput, match=said):
        models.file_in(tmp_path, other, alone=False)


def test_a_refusal_leaves_what_was_there_and_what_rows_name(tmp_path):
    out = tmp_path / "deep" / "runs"
    point = a_checkpoint()
    files = {out / "checkpoint.safetensors": point}
    with pytest.raises(BadInput), models.kept(out, files):
        raise BadInput("no")
    assert not (tmp_path / "deep").exists()
    # A file beside them stays, and so does its folder
    with pytest.raises(BadInput), models.kept(out, files):
        (out.parent / "note.txt").write_text("mine")
        raise BadInput("no")
    assert [path.name for path in out.parent.iterdir()] == ["note.txt"]
    # Once a run folder is there, its rows name the weights
    with pytest.raises(BadInput), models.kept(out, files):
        (out / "knn-mine-knn").mkdir()
        raise BadInput("no")
    assert (out / "checkpoint.safetensors").exists()
    # Weights that were there before stay, whatever is refused
    with pytest.raises(BadInput), models.kept(out, files):
        raise BadInput("no")
    assert (out / "checkpoint.safetensors").exists()
