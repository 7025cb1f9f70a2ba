"""Refuses a wish for GPUs that are not here."""

from backbench.errors import BadInput


def refuse_missing(accelerator: str, devices: int = 1) -> None:
    """Raise BadInput where `devices` GPUs are asked for, and torch finds fewer."""
    if accelerator != "cuda":
        return
    import torch  # a request for the CPU is refused or planned without it

    found = torch.cuda.device_count()
    if not found:
        raise BadInput(
            "--accelerator cuda: torch finds no GPU; use --accelerator cpu, or see `backbench doctor`"
        )
    if found < devices:
        gpus = "1 GPU" if found == 1 else f"{found} GPUs"
        raise BadInput(
            f"--devices {devices}: torch finds {gpus} here; use"
            f" --devices {found}, or see `backbench doctor`"
        )
