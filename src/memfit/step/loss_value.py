"""The loss as a number on the host."""

from __future__ import annotations

import torch


class LossValue:
    """The value of one loss.

    A GPU is not waited for until it is read: the value is copied to the host while backward is launched, so the GPU goes from forward to backward at once.
    """

    def __init__(self) -> None:
        self._value: float | None = None
        self._on_the_way: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def take(self, loss: torch.Tensor) -> None:
        """Of this loss, a tensor with one element. Nothing is allocated on the device."""
        if loss.device.type != "cuda":
            self._value = loss.item()
            return
        copy = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
        copy.copy_(loss.detach(), non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(loss.device))
        self._on_the_way = copy, done

    @property
    def here(self) -> bool:
        """Whether it can be read without waiting."""
        return self._on_the_way is None

    def read(self) -> float:
        """The number, once it is here."""
        if self._on_the_way is not None:
            copy, done = self._on_the_way
            done.synchronize()
            self._value, self._on_the_way = copy.item(), None
        assert self._value is not None, "no loss was taken"
        return self._value
