"""All requests, in the order of `backbench --help`."""

from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.data import (
    DataCheckRequest,
    DataListRequest,
    DataPackRequest,
    FetchSplitsRequest,
)
from backbench.requests.demo import DemoRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.doctor import DoctorRequest
from backbench.requests.evaluate import EvaluateRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.launch import (
    LaunchCancelRequest,
    LaunchRetryRequest,
    LaunchRunRequest,
    LaunchStatusRequest,
)
from backbench.requests.options import Request
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.requests.published import PaperRequest, ReproduceRequest
from backbench.requests.runs import (
    CalibrateRequest,
    CleanRequest,
    ErrorsRequest,
    ExportResultsRequest,
    LeaderboardRequest,
    LogRequest,
    MergeRequest,
    RankRequest,
    RescoreRequest,
    VerifyRequest,
)
from backbench.requests.weights import ExportRequest, ImportRequest, InspectRequest

REQUESTS: tuple[type[Request], ...] = (
    DemoRequest,
    PretrainRequest,
    EvaluateRequest,
    InspectRequest,
    ImportRequest,
    ExportRequest,
    LinearRequest,
    OodRequest,
    SemisupRequest,
    FinetuneRequest,
    AnalyzeRequest,
    DetectRequest,
    LaunchRunRequest,
    LaunchStatusRequest,
    LaunchRetryRequest,
    LaunchCancelRequest,
    LeaderboardRequest,
    VerifyRequest,
    CalibrateRequest,
    RescoreRequest,
    ErrorsRequest,
    RankRequest,
    MergeRequest,
    ExportResultsRequest,
    PaperRequest,
    ReproduceRequest,
    LogRequest,
    DataListRequest,
    DataCheckRequest,
    DataPackRequest,
    FetchSplitsRequest,
    DoctorRequest,
    CleanRequest,
)

# What `backbench --help` says of the verbs that have verbs of their own
GROUPS = {
    "launch": "Run grids of jobs on Slurm or on this machine.",
    "data": "List and check datasets.",
}
