"""A printed table's claims: which pairs hold, are reversed, cannot be told apart, are not measured."""

import json
import re

import pytest
from support import boards, records

from backbench.board.board import Board, collect
from backbench.cli.program import main
from backbench.pretrain.recipe import PretrainConfig
from backbench.published import catalogue, claims, published
from backbench.recipes import config, fast

KIND = ("linear", "cifar10", "top1", "linear-lorac-v1", None)
# As printed, the worst first: 82.3, 89.8, 91.4, 91.8
NAMES = {
    "moco-v1": "moco_v1",
    "moco-v2": "moco_v2",
    "moco-m": "moco_m",
    "lorac": "lorac",
}


def pretrained(runs, kind, trunks, **more):
    """Write rows of trunks t0, t1, ..., of which each next is `gap` better.

    A trunk is (recipe, None if nobody knows it; seed; overrides ...).
    """
    names = [f"t{n}" for n in range(len(trunks))]
    boards.synthetic(runs, names, [kind], images=10_000, **more)
    for name, (recipe, seed, *own) in zip(names, trunks):
        if recipe is None:
            continue
        overrides = [f"seed={seed}", *own]
        about = config.load(PretrainConfig, recipe, overrides, kind="pretrain")
        file = runs / f"{name}.safetensors"
        digest = boards.digest_of(name)
        records.checkpoint_header(file, digest, recipe=config.to_dict(about))


def measured(runs, names, *overrides, **more):
    """Write three probes of each trunk; the overrides are of LORAC's recipe alone."""
    trunks = []
    for name in names:
        own = overrides if name == "lorac" else ()
        trunks.append((f"lorac/{NAMES[name]}_imagenet", 0, *own))
    pretrained(runs, KIND, trunks, **{"gap": 4.0, "seeds": 3, "trainings": 0.1, **more})


def test_a_number_of_a_page_counts_as_measured(tmp_path):
    kind = ("knn", "imagenet", "top1_k20", "knn-dino-v1", None)
    boards.synthetic(tmp_path, ["dino_vits16", "another"], [kind])
    assert catalogue.sources(collect([tmp_path]), [])[-1].measured == 1


def said(capsys, runs):
    """Return (better, worse) -> verdict for the measured pairs of Table 2, and the line of counts."""
    assert main(["paper", "lorac:2", str(runs)]) == 0
    out = capsys.readouterr().out.splitlines()
    pairs = {}
    for line in (x for x in out if x.startswith("  claim linear/cifar10/top1: ")):
        better, _, rest = line.split(": ", 1)[1].partition(" > ")
        pairs[better.split(":")[0], rest.split(":")[0]] = line.rsplit(": ", 1)[1]
    (count,) = (x for x in out if " claims: " in x)
    return pairs, count


def test_the_printed_order_holds_or_is_reversed_here_and_on_the_page(tmp_path, capsys):
    measured(tmp_path / "printed", NAMES)
    pairs, count = said(capsys, tmp_path / "printed")
    assert len(pairs) == 6
    assert set(pairs.values()) == {"holds"}
    assert ("lorac", "moco-v1") in pairs
    assert "claims: 6 hold, " in count
    assert "not measured" in count
    assert "reversed" not in count
    measured(tmp_path / "runs", list(NAMES)[::-1])
    pairs, count = said(capsys, tmp_path / "runs")
    assert len(pairs) == 6
    assert set(pairs.values()) == {"reversed"}
    assert "6 reversed" in count
    page = tmp_path / "l.html"
    assert main(["leaderboard", str(tmp_path / "runs"), "--html", str(page), "-q"]) == 0
    script = r'<script type="application/json" id="data">(.*?)</script>'
    data = re.search(script, page.read_text(), re.S)
    papers, timm, testbed, pages, first, *others = json.loads(data[1])["claims"]
    assert papers.startswith(
        "papers: 834 printed, 530 judgeable (of them 108 on a lost L,"
        " 86 on a training that explodes), 4 measured"
    )
    assert all(each.endswith(" 0 measured") for each in (timm, testbed, pages))
    assert first.startswith("lorac:2: ")
    assert "6 reversed" in first
    assert len(others) == 6
    largest = "lorac:resnet50:200 > moco-v1:resnet50:200 by 9.5, measured -"
    assert any(largest in line for line in others)


@pytest.mark.parametrize(
    "how", [{"gap": 0.0}, {"gap": 0.1}, {"trainings": 8.0}, {"seeds": 1}]
)
def test_what_no_test_separates_cannot_be_told_apart(tmp_path, capsys, how):
    """Equal trunks; a gap below the noise; trainings that spread; noise that nobody knows."""
    measured(tmp_path, NAMES, **how)
    pairs, count = said(capsys, tmp_path)
    assert len(pairs) == 6
    assert set(pairs.values()) == {"cannot be told apart"}, pairs
    assert "6 cannot be told apart" in count


def test_a_changed_recipe_and_missing_trunks_prove_nothing(tmp_path, capsys):
    measured(tmp_path, NAMES, "method.beta=2")
    pairs, _ = said(capsys, tmp_path)
    assert set(pairs) == {
        ("moco-m", "moco-v2"),
        ("moco-m", "moco-v1"),
        ("moco-v2", "moco-v1"),
    }
    assert main(["paper", "lorac:2"]) == 0
    (count,) = (x for x in capsys.readouterr().out.splitlines() if " claims: " in x)
    assert "not measured" in count.split(" claims: ")[1]


@pytest.mark.parametrize("how", ["unbacked", "unsettled"])
def test_what_cannot_be_tested_is_not_measured(tmp_path, capsys, how):
    """No number is backed if nothing is kept; LORAC's is not settled if its fit did not converge."""
    measured(tmp_path, NAMES, kept=how == "unsettled")
    if how == "unsettled":
        (file,) = tmp_path.rglob("t3/results.jsonl")  # LORAC's
        records.edit_lines(file, lambda row: row["chosen"].update(converged=False))
    pairs, _ = said(capsys, tmp_path)
    assert len(pairs) == (3 if how == "unsettled" else 0)
    assert not any("lorac" in pair for pair in pairs)


def test_equal_numbers_claim_nothing():
    numbers = [n for n in published.rows() if n.key.startswith("lorac:2:")]
    made = claims.of_table(numbers, Board(), [])
    columns = {}
    for n in numbers:
        columns.setdefault((n.task, n.dataset, n.metric), []).append(n.value)
    pairs = sum(a < b for values in columns.values() for a in values for b in values)
    assert len(made) == pairs
    assert {claim.verdict for claim in made} == {claims.NOT_MEASURED}
    assert all(claim.better.value > claim.worse.value for claim in made)


MOCO, LORAC = "lorac/moco_m_imagenet", "lorac/lorac_imagenet"
# Pretrainings that spread by 4 points, LORAC 6 points better in the mean
SPREAD = [
    (MOCO, 0),
    (None, 0),
    (MOCO, 1),
    (LORAC, 0),
    (MOCO, 2),
    (LORAC, 1),
    (None, 0),
    (LORAC, 2),
]


def test_the_trunk_to_the_papers_letter_goes_before_fast_ones(tmp_path, capsys):
    """LORAC's is worse than MoCo-M, and its three fast pretrainings are better."""
    trunks = [(LORAC, 0), (MOCO, 0)]
    for seed in range(3):
        trunks.append((LORAC, seed, *fast.spelled()))
    pretrained(tmp_path, KIND, trunks, gap=4.0, seeds=3, trainings=0.1)
    assert said(capsys, tmp_path)[0] == {("lorac", "moco-m"): "reversed"}


@pytest.mark.parametrize("probes", [1, 3])
def test_probes_of_one_trunk_are_no_pretrainings(tmp_path, capsys, probes):
    """t(4) = 6 / (4 sqrt(2/3)) = 1.8; nine probes each, taken for pretrainings, give 3.5."""
    pretrained(tmp_path, KIND, SPREAD, gap=2.0, seeds=probes, trainings=0.1)
    assert said(capsys, tmp_path)[0] == {("lorac", "moco-m"): "cannot be told apart"}


@pytest.mark.parametrize(
    ("mixed", "verdict"), [(True, "cannot be told apart"), (False, "holds")]
)
def test_pretrainings_spread_where_the_task_trains_nothing(
    tmp_path, capsys, mixed, verdict
):
    """Their spread counts for neighbours, too, which are the same each time."""
    order = []
    for seed in range(3):
        order += [("arb/arb_direct_cifar100", seed), ("arb/arb_cifar100_256", seed)]
    kind = ("knn", "cifar100", "top1_k5", "knn-32px-v1", None)
    if not mixed:
        order.sort(reverse=True)
    pretrained(tmp_path, kind, order, gap=2.0)
    records.edit_lines(tmp_path, lambda row: row.update(arch="resnet18", epochs=1000))
    assert main(["paper", "arb:3", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (claim,) = (line for line in lines if line.startswith("  claim "))
    assert claim.endswith(f": {verdict}"), claim
