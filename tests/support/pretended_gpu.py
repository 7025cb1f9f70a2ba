"""A GPU where there is none: tensors that compute on the CPU and say they are on `cuda:0`.

    with PretendedGpu() as gpu:
        method.to("cuda")
        ...
        gpu.take()  # what has waited for the device since: [] where nothing has

Tensors of the two places do not mix (0-dim ones on the CPU may). A wait is what
`torch.cuda.set_sync_debug_mode` warns of: a value that is read, a result whose shape depends on
values, a copy down, a copy up that is not `non_blocking`, a decomposition that looks whether it
succeeded. Not shown: kernels, streams, memory, precision, `torch.compile`.

Below, such a tensor is one of torch's device `meta`, for which autograd needs no driver; each
operation runs on the CPU tensor that it wraps.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchvision  # noqa: F401  (its operations)
from packaging import version
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, META = torch.device("cuda:0"), torch.device("meta")
HOME = Path(__file__).parents[2]
aten = torch.ops.aten

# The result, or its shape, needs values
READS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
}
READS |= {aten.unique_dim, aten._unique2, aten.unique_consecutive, aten.bincount}
READS |= {
    aten._linalg_eigh,
    aten._linalg_svd,
    aten._linalg_check_errors,
    aten._linalg_eigvals,
}
READS |= {torch.ops.torchvision.nms}
COPIES = {aten._to_copy, aten.copy_, aten._copy_from}
OLDER = version.parse(torch.__version__) < version.parse("2.15")  # of x[mask] = number
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


# Synchronised batch norm, which torch has for GPUs alone
def _rows(x: Tensor) -> Tensor:
    return x.movedim(1, -1).flatten(0, -2)


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rows(x).mean(0), (_rows(x).var(0, correction=0) + eps).rsqrt()


def _gather(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    kept_mean: Tensor,
    kept_var: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    momentum, eps, counts = rest
    share = (counts / counts.sum())[:, None]
    mean = (share * means).sum(0)
    variance = (share * (inverses**-2 - eps + (means - mean) ** 2)).sum(0)
    kept_mean.lerp_(mean, momentum)
    kept_var.lerp_(variance / (1 - 1 / counts.sum()), momentum)
    return mean, (variance + eps).rsqrt()


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, *moments: Any) -> Tensor:
    mean, inverse, _ = moments
    return ((x.movedim(1, -1) - mean) * inverse * weight + bias).movedim(-1, 1)


def _reduced(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    product = (_rows(grad) * (_rows(x) - mean)).sum(0)
    return _rows(grad).sum(0), product, product * inverse, _rows(grad).sum(0)


def _gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    *sums: Tensor,
) -> Tensor:
    of_grad, of_product, counts = sums
    along = (x.movedim(1, -1) - mean) * inverse**2 * of_product / counts.sum()
    there = grad.movedim(1, -1) - of_grad / counts.sum() - along
    return (there * inverse * weight).movedim(-1, 1)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats: _stats,
    aten.batch_norm_gather_stats_with_counts: _gather,
    aten.batch_norm_elemt: _normalised,
    aten.batch_norm_backward_reduce: _reduced,
    aten.batch_norm_backward_elemt: _gradient,
}


class OnGpu(Tensor):
    """A tensor that says it is on `cuda:0`; `host` is the CPU tensor that it is made of."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=META,
        )
        made.host = host
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func}: a tensor of PretendedGpu has outlived it")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.host!r})"


def _is_cuda(x: object) -> bool:
    if isinstance(x, str):
        return x == "cuda" or x.startswith("cuda:")
    return isinstance(x, torch.device) and x.type == "cuda"


class _Requests(TorchFunctionMode):
    """Whoever asks for a place on `cuda` gets one."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], META)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "asarray") and _is_cuda(
            kwargs.get("device")
        ):
            # From lists: made on the host, and copied up
            kwargs.pop("device")
            return func(*args, **kwargs).to(META)
        if name == "new_tensor" and isinstance(args[0], OnGpu):
            return torch.tensor(*args[1:], dtype=args[0].dtype, **kwargs).to(META)
        if name in ("tolist", "numpy") and isinstance(args[0], OnGpu):
            self.gpu.waits(name)
            args = (args[0].host, *args[1:])
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(
            args[0], OnGpu
        ):
            # Below this, torch would make the index from the list without any operation
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = tuple(
                torch.tensor(i).to(META) if isinstance(i, list) else i for i in index
            )
            args = (args[0], lists, *args[2:])
        return func(*_mapped(_placeless, args), **_mapped(_placeless, kwargs))


class _Event:
    """Of torch.cuda: what was asked of the device is done by the time that anyone asks."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PretendedGpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._seen: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> PretendedGpu:
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        # A module's parameters cannot become of another class in place
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._stack.callback(
            torch.__future__.set_overwrite_module_params_on_conversion, before
        )
        # Which would choose other operations for a GPU, and is whatever an earlier test has left
        exact = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        self._stack.callback(torch.use_deterministic_algorithms, exact)
        self._stack.enter_context(mock.patch.object(torch.cuda, "Event", _Event))
        self._stack.enter_context(_Requests(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def take(self) -> list[str]:
        """The waits so far, each with the lines of this project that led to it; then forgotten."""
        seen, self._seen = self._seen, []
        return seen

    def waits(self, why: str) -> None:
        lines = [
            f"{Path(frame.filename).relative_to(HOME)}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(HOME))
            and "site-packages" not in frame.filename
            and frame.filename != __file__
        ]
        self._seen.append(f"{why} at {' < '.join(reversed(lines[-3:])) or 'backward'}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        leaves = list(_tensors((args, kwargs)))
        ours = [x for x in leaves if isinstance(x, OnGpu)]
        others = [x for x in leaves if not isinstance(x, OnGpu)]
        target = kwargs.get("device")
        stays = bool(ours) and target is None
        if packet in COPIES:
            stays = self._copied(packet, args, kwargs)
        elif packet in INDEXING:
            self._indexed(func, args)
        elif ours and any(x.ndim for x in others):
            shapes = [tuple(x.shape) for x in others if x.ndim]
            raise RuntimeError(f"{func}: tensors on cuda:0 and on the CPU, {shapes}")
        if packet in READS and ours:
            self.waits(str(packet))
        if target is not None:
            target = torch.device(target)
            stays = target.type == "meta"
            kwargs["device"] = torch.device("cpu") if stays else target
        # The operation itself, on the CPU; what was changed in place comes back as it was given
        known = {id(x.host): x for x in ours}
        kernel = KERNELS.get(packet, func)
        out = kernel(*_mapped(_bare, args), **_mapped(_bare, kwargs))

        def placed(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            if id(x) in known:
                return known[id(x)]
            return OnGpu(x) if stays else x

        return _mapped(placed, out)

    def _copied(self, packet: Any, args: Any, kwargs: Any) -> bool:
        """Counts a copy between the places; whether its result is on the device."""
        if packet is aten._to_copy:
            source = isinstance(args[0], OnGpu)
            target = kwargs.get("device")
            goal = source if target is None else torch.device(target).type == "meta"
        else:
            source, goal = isinstance(args[1], OnGpu), isinstance(args[0], OnGpu)
        if source and not goal and not self._behind(packet, args, kwargs):
            self.waits("copy down")
        # A 0-dim number goes up as a kernel's argument only where it is no copy
        if goal and not source and not self._behind(packet, args, kwargs):
            self.waits("copy up")
        return goal

    @staticmethod
    def _behind(packet: Any, args: Any, kwargs: Any) -> bool:
        """Is the copy `non_blocking`?"""
        if packet is aten.copy_ and len(args) > 2:
            return bool(args[2])
        return bool(kwargs.get("non_blocking", False))

    def _indexed(self, func: Any, args: Any) -> None:
        """Masks are counted out by the host; indices that lie there go up."""
        if not isinstance(args[0], OnGpu):
            if any(isinstance(i, OnGpu) for i in args[1]):
                raise RuntimeError(f"{func}: a tensor on the CPU, indices on cuda:0")
            return
        # x[mask] = 1.0: torch 2.15 calls masked_fill_ itself. Older ones come through here with the
        # number as a tensor without dimensions, and fill in ATen (canDispatchToMaskedFill)
        given = [i for i in args[1] if i is not None]
        number = OLDER and len(args) > 2 and not args[2].ndim
        filled = number and len(given) == 1 and given[0].dtype == torch.bool
        for index in [] if filled else given:
            if index.dtype in (torch.bool, torch.uint8):
                self.waits(f"{func.overloadpacket} by a mask")
            if not isinstance(index, OnGpu):
                self.waits(f"{func.overloadpacket} by indices on the CPU")


def _bare(x: object) -> object:
    return x.host if isinstance(x, OnGpu) else x


def _placeless(x: object) -> object:
    return META if _is_cuda(x) else x


def _mapped(function: Callable[[object], object], x: Any) -> Any:
    """In lists, tuples and dicts; torch's own takes ten times as long."""
    if isinstance(x, list):
        return [_mapped(function, y) for y in x]
    if type(x) is tuple:
        return tuple([_mapped(function, y) for y in x])
    if isinstance(x, dict):
        return {key: _mapped(function, y) for key, y in x.items()}
    return function(x)


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))
