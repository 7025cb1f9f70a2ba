"""Checks the rules of method.py in a run's first step, before hours of training."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from backbench.errors import Failed
from backbench.parallel import distributed
from backbench.pretrain.method import Method

# Ranks compute the same loss from the same numbers, but unlike processors may round it differently
EQUAL = 1e-5

Plain = int | float | str | None


class FirstStep:
    """Checks `terms` after forward, `gradients` after backward and `state` after `after_step`. All
    of it happens in the first step only; later calls return at once. The checks change no number
    and draw none. Ranks exchange one float."""

    def __init__(self, method: Method, name: str) -> None:
        self.method = method
        self.name = name
        self.over = False
        self.before = dict(_plain_attributes(method))

    def terms(self, terms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Check rules 2 and 4 on the result of `forward`, and return it."""
        if self.over:
            return terms
        if not isinstance(terms, Mapping) or "loss" not in terms:
            raise self._broken(
                f'forward returns {{"loss": ..., **terms}}, not {terms!r:.60}'
            )
        for term, value in terms.items():
            if not isinstance(value, Tensor):
                raise self._broken(
                    f"'{term}' must be a 0-dim tensor, not {value!r:.60}"
                )
            if value.ndim:
                raise self._broken(
                    f"'{term}' must be a 0-dim tensor, not shape {tuple(value.shape)}"
                )
        loss = terms["loss"]
        if not loss.requires_grad or not loss.is_floating_point():
            raise self._broken("'loss' has no gradient; it is what is minimised")
        for term, value in terms.items():
            if value.requires_grad and value is not loss:
                raise self._broken(f"'{term}' is only logged; detach it")
        losses = distributed.gather_without_gradient(loss.detach().double().reshape(1))
        # A loss that is not finite passes this comparison; the loop refuses it
        apart = float(losses.max() - losses.min())
        if apart > EQUAL * float(losses.abs().max()):
            raise self._broken(
                f"the loss differs between ranks ({losses.tolist()!s:.80}); a mean over a rank's "
                "own samples goes through distributed.mean_over_ranks, in forward"
            )
        return terms

    def gradients(self) -> None:
        """Check rule 3: every parameter that requires a gradient has one."""
        if self.over:
            return
        missing = []
        for name, parameter in self.method.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                missing.append(name)
        if missing:
            more = ""
            if len(missing) > 1:
                more = f" and {len(missing) - 1} more"
            raise self._broken(
                f"no gradient reaches {missing[0]}{more}, and several processes would wait for it; "
                "what stands still for a while takes part as p.detach() + 0.0 * p, what is never "
                "trained needs requires_grad_(False)"
            )

    def state(self) -> None:
        """Check rule 5: what a step leaves for the next is a parameter or a buffer."""
        if self.over:
            return
        self.over = True
        kept = {id(x) for x in (*self.method.parameters(), *self.method.buffers())}
        for where, _, value in _attributes(self.method):
            if any(id(x) not in kept for x in _tensors_in(value)):
                raise self._broken(
                    f"attribute {where} holds a tensor after after_step, which state.pt does not; "
                    "register a buffer, or clear it there"
                )
        for where, value in _plain_attributes(self.method):
            if where not in self.before or self.before[where] != value:
                raise self._broken(
                    f"attribute {where} has changed to {value!r:.40} in a step, which state.pt "
                    "does not hold; count in a buffer, or take step and progress from the batch"
                )

    def _broken(self, what: str) -> Failed:
        return Failed(
            f"method '{self.name}' breaks a rule of pretrain/method.py: {what}"
        )


def _attributes(method: nn.Module) -> Iterator[tuple[str, nn.Module, object]]:
    """Yield (where, module, value) of every attribute that torch itself does not manage."""
    for path, module in method.named_modules():
        # torch's weight_norm and spectral_norm compute `weight` anew in every forward, from
        # parameters named `weight_v` and `weight_orig`
        kept = {"_parameters", "_buffers", "_modules", "training"}
        for name in module._parameters:
            kept |= {name.removesuffix("_v"), name.removesuffix("_orig")} - {name}
        for name, value in vars(module).items():
            if name not in kept:
                yield f"{path}.{name}".lstrip("."), module, value


def _plain_attributes(method: nn.Module) -> Iterator[tuple[str, Plain]]:
    """Yield (where, value) of numbers and words that the method's own modules hold. torch's modules
    change none in a step."""
    for where, module, value in _attributes(method):
        own = not type(module).__module__.startswith("torch.")
        if own and (value is None or isinstance(value, int | float | str)):
            yield where, value


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _tensors_in(inner)
