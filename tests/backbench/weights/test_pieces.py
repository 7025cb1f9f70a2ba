"""Files of large trainings: wrappers inside names, and pieces of a model that lie in many files."""

import re
import shlex

import pytest
import torch
from safetensors.torch import save_file
from support import foreign_fixtures as fx
from support import timm_fixtures

from backbench.cli import program
from backbench.errors import BadInput
from backbench.weights import importing
from backbench.weights.weight_file import open_file

WRAPPERS = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "_fsdp_wrapped_module._fpw_module",
    "module",
    "_forward_module",
    "_checkpoint_wrapped_module._orig_mod",
)


def with_wrapper(key, wrapper):
    """Wrap each block of a stage: layer1.0.conv1.weight -> layer1.0.WRAPPER.conv1.weight."""
    if not key.startswith("layer"):
        return key
    stage, block, *rest = key.split(".")
    return ".".join([stage, block, wrapper, *rest])


@pytest.fixture(scope="module")
def unwrapped(tmp_path_factory):
    """The checkpoint of the same file without wrappers."""
    file = tmp_path_factory.mktemp("unwrapped") / "plain.pth"
    torch.save(fx.known_resnet("resnet18").state_dict(), file)
    return importing.read(file)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("around", ["", "module._orig_mod.", "_forward_module.module."])
def test_wrappers_are_taken_out_wherever_they_stand(
    wrapper, around, unwrapped, tmp_path
):
    plain = fx.known_resnet("resnet18").state_dict()
    wrapped = {around + with_wrapper(key, wrapper): plain[key] for key in plain}
    torch.save(wrapped, tmp_path / "x.pth")
    found = importing.read(tmp_path / "x.pth")
    assert found.digest == unwrapped.digest
    formats = found.provenance["format"], unwrapped.provenance["format"]
    assert formats == ("torchvision", "torchvision")
    assert found.heads.keys() == unwrapped.heads.keys() == {"fc.weight", "fc.bias"}


def test_wrapped_transformers_of_a_recognised_format(tmp_path):
    maker = timm_fixtures.dinov2
    _, arch, _, options, *_ = timm_fixtures.CASES[maker]
    state = timm_fixtures.known(arch)
    made = {}
    for key, value in maker(state).items():
        made[key.replace("mlp.", "_checkpoint_wrapped_module.mlp._orig_mod.")] = value
    torch.save(made, tmp_path / "x.pth")
    found = importing.read(tmp_path / "x.pth", arch=arch, **options)
    assert all(torch.equal(found.state_dict[key], state[key]) for key in state)


def test_two_networks_are_not_made_one_by_their_wrapper(tmp_path):
    """A name that would be given twice stays as it is, and its two trunks are refused."""
    one = fx.known_resnet("resnet18").state_dict()
    table = dict(one)
    for key, value in one.items():
        table[with_wrapper(key, "module")] = value + 1
    torch.save(table, tmp_path / "x.pth")
    with pytest.raises(BadInput):
        importing.read(tmp_path / "x.pth")


def test_teacher_and_student_of_dinov2_are_told_apart(tmp_path):
    maker = timm_fixtures.dinov2_consolidated
    arch = timm_fixtures.CASES[maker][1]
    torch.save(maker(timm_fixtures.known(arch)), tmp_path / "x.pth")
    teacher = importing.read(tmp_path / "x.pth", arch=arch)
    student = importing.read(tmp_path / "x.pth", arch=arch, encoder="student")
    assert (teacher.method, teacher.provenance["encoder"]) == ("dinov2", "teacher")
    assert teacher.digest != student.digest


def numbered_files(folder):
    tensors = fx.known_resnet("resnet18").state_dict()
    # safetensors writes no two tensors of the same memory.
    first = {key: tensors[key].clone() for key in list(tensors)[:60]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    second = {key: tensors[key].clone() for key in tensors if key not in first}
    save_file(second, folder / "model-00002-of-00002.safetensors")
    return tensors


def distcp(folder):
    (folder / "__0_0.distcp").write_bytes(b"PK\x03\x04")
    return folder


def distcp_file(folder):
    return distcp(folder) / "__0_0.distcp"


def one_of_numbered(folder):
    numbered_files(folder)
    return folder / "model-00002-of-00002.safetensors"


def numbered_folder(folder):
    numbered_files(folder)
    return folder


def index_of_numbered(folder):
    file = folder / "model.safetensors.index.json"
    file.write_text('{"weight_map": {}}')
    return file


def flat_parameters(folder):
    names = [f"teacher.backbone.blocks.{i}._flat_param" for i in range(4)]
    torch.save({"model": {name: torch.ones(9) for name in names}}, folder / "x.pth")
    return folder / "x.pth"


def deepspeed(folder):
    state = {key: torch.zeros(0) for key in fx.known_resnet("resnet18").state_dict()}
    step = folder / "global_step9"
    step.mkdir()
    torch.save({"module": state}, step / "mp_rank_00_model_states.pt")
    return step / "mp_rank_00_model_states.pt"


def deepspeed_folder(folder):
    return deepspeed(folder).parent


PIECES = {
    distcp: "format_utils dcp_to_torch",
    distcp_file: "format_utils dcp_to_torch",
    one_of_numbered: "save_file(",
    numbered_folder: "save_file(",
    index_of_numbered: "join the files",
    flat_parameters: "FULL_STATE_DICT",
    deepspeed: "zero_to_fp32.py",
    deepspeed_folder: "zero_to_fp32.py",
}


@pytest.mark.parametrize("maker", PIECES, ids=lambda maker: maker.__name__)
def test_a_piece_of_a_model_is_refused_with_the_command_that_joins(
    maker, tmp_path, capsys
):
    path = maker(tmp_path)
    out = tmp_path / "out.safetensors"
    assert program.main(["import", str(path), "--out", str(out)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert str(path) in line and PIECES[maker] in line, line
    assert not out.exists()


NAMES = ["run", "run[1]", "my run", "it's", 'a "b" $c']


def command_of(path):
    """The words of the command that the refusal gives, as a shell takes them."""
    with pytest.raises(BadInput) as error:
        open_file(path)
    return shlex.split(re.search(r"`(python .+)`", str(error.value))[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_command_that_joins_numbered_files_works(name, tmp_path, monkeypatch):
    folder = tmp_path / name
    folder.mkdir()
    tensors = numbered_files(folder)
    python, option, script = command_of(folder)
    assert (python, option) == ("python", "-c")
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    joined = importing.read(tmp_path / "OUT.safetensors")
    for key, tensor in joined.state_dict.items():
        assert torch.equal(tensor, tensors[key])


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_other_libraries_get_the_folder_as_one_word(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    assert command_of(distcp(folder))[-2:] == [str(folder), "OUT.pth"]
    folder = tmp_path / "deepspeed" / name
    folder.mkdir(parents=True)
    script = f"{folder}/zero_to_fp32.py"
    words = ["python", script, str(folder), "OUT"]
    assert command_of(deepspeed_folder(folder)) == words


def test_a_whole_model_that_deepspeed_has_not_cut_goes_in(tmp_path):
    state = fx.known_resnet("resnet18").state_dict()
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": state}, file)
    found = importing.read(file)
    assert all(
        torch.equal(found.state_dict[key], state[key]) for key in found.state_dict
    )
