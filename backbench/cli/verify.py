"""`backbench verify`: every number below some folders, computed again from what was kept."""

from collections import Counter

from backbench.board.board import read_verified
from backbench.errors import EXIT_FAILED, BadInput
from backbench.records import store
from backbench.requests.options import Outcome
from backbench.requests.runs import VerifyRequest
from backbench.runs.folder import RESULTS_FILE
from backbench.untrusted import printable
from backbench.verify import verification


def run(request: VerifyRequest) -> Outcome:
    """Run the verb `verify`. Returns 1 where something does not fit."""
    problems: list[str] = []
    files = [file for runs in request.runs for file in store.files_below(runs)]
    measurements = read_verified(files, problems)
    if not measurements and not problems:
        where = ", ".join(map(str, request.runs))
        raise BadInput(
            f"{where}: no {RESULTS_FILE} below; give the --out of an evaluation"
        )
    for problem in problems:
        print(printable.shown(problem, 1000))
    count = Counter(
        measurement.result.origin["verified"] for measurement in measurements
    )
    for level, words in verification.LEVELS.items():
        print(f"{count[level]:>7} level {level}: {words}")
    print(f"{len(problems):>7} do not fit")
    return Outcome(status=EXIT_FAILED if problems else 0)
