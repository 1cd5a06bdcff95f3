"""The memories that an encoder of histories can have, one class each behind one small interface.

Inputs and outputs have time first, ``(T, B, size)``; the memory of a cell is a tuple of tensors ``(layers, B, size)``.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_ben.common.checks import check

__all__ = ["CELLS", "Cell", "GruCell", "Hidden", "LinearCell", "LstmCell", "NoMemory", "linear_scan", "select_rows"]

#: the memory of a cell: one entry for a GRU, two for an LSTM, none without memory; each ``(layers, batch, size)``
Hidden = tuple[th.Tensor, ...]


def select_rows(mask: th.Tensor, fresh: Hidden, old: Hidden) -> Hidden:
    """Memories, taken from ``fresh`` for the environments in the mask and from ``old`` for the others."""
    return tuple(th.where(mask[None, :, None], new, kept) for new, kept in zip(fresh, old, strict=True))


def linear_scan(inputs: th.Tensor, decay: th.Tensor, before: th.Tensor | None = None) -> th.Tensor:
    r"""The linear recurrence :math:`z_t = \lambda \odot z_{t-1} + x_t` over all steps, in a logarithmic number of passes.

    :param inputs: x ``(T, B, size)``
    :param decay: lambda ``(size,)``
    :param before: z before the first step ``(B, size)``, nothing if not given
    """
    if before is not None and len(inputs) == 1:
        return inputs + decay * before
    z = inputs if before is None else th.cat((inputs[:1] + decay * before, inputs[1:]))
    stride = 1
    while stride < len(z):  # twice as far back in every pass
        z = th.cat((z[:stride], z[stride:] + decay * z[:-stride]))
        stride, decay = 2 * stride, decay.square()
    return z


class Cell(nn.Module, abc.ABC):
    """Interface of the memories."""

    #: whether the history before the newest observation is seen at all
    has_memory: ClassVar[bool] = True
    #: number of tensors that are remembered
    n_parts: ClassVar[int] = 1
    output_size: int

    @abc.abstractmethod
    def initial(self, batch_size: int, device: th.device) -> Hidden:
        """The memory of episodes that have just begun."""

    @abc.abstractmethod
    def recur(self, inputs: th.Tensor, hidden: Hidden) -> tuple[th.Tensor, Hidden]:
        """One pass over histories: outputs ``(T, B, output_size)`` and the memory after the last step.

        :param inputs: ``(T, B, input_size)``
        :param hidden: the memory before the first step
        """

    def states(self, inputs: th.Tensor, hidden: Hidden) -> Hidden:
        """The memory after each step, ``(layers, T, B, size)``: by a loop over time, unless the cell knows better."""
        steps = []
        for one in inputs:
            _, hidden = self.recur(one[None], hidden)
            steps.append(hidden)
        return tuple(th.stack(parts, dim=1) for parts in zip(*steps, strict=True))


class LstmCell(nn.LSTM, Cell):
    """Long short-term memory, with torch's arguments."""

    n_parts = 2

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, **kwargs: Any) -> None:
        super().__init__(input_size, hidden_size, num_layers, **kwargs)
        self.output_size = hidden_size

    def initial(self, batch_size: int, device: th.device) -> Hidden:
        zeros = th.zeros(self.num_layers, batch_size, self.hidden_size, device=device)
        return zeros, zeros

    def recur(self, inputs: th.Tensor, hidden: Hidden) -> tuple[th.Tensor, Hidden]:
        if len(inputs) > 1 or self.num_layers > 1:
            return self(inputs, hidden)
        # a single step as a cell is several times as fast as a sequence of length one
        output, cell = th.lstm_cell(inputs[0], [part[0] for part in hidden], *self._flat_weights)  # type: ignore[arg-type]
        return output[None], (output[None], cell[None])


class GruCell(nn.GRU, Cell):
    """Gated recurrent units, the paper's cell, with torch's arguments."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, **kwargs: Any) -> None:
        super().__init__(input_size, hidden_size, num_layers, **kwargs)
        self.output_size = hidden_size

    def initial(self, batch_size: int, device: th.device) -> Hidden:
        return (th.zeros(self.num_layers, batch_size, self.hidden_size, device=device),)

    def recur(self, inputs: th.Tensor, hidden: Hidden) -> tuple[th.Tensor, Hidden]:
        if len(inputs) > 1 or self.num_layers > 1:
            outputs, after = self(inputs, hidden[0])
            return outputs, (after,)
        output = th.gru_cell(inputs[0], hidden[0][0], *self._flat_weights)  # type: ignore[arg-type]
        return output[None], (output[None],)

    def states(self, inputs: th.Tensor, hidden: Hidden) -> Hidden:
        # the outputs of a single layer are its memory
        return super().states(inputs, hidden) if self.num_layers > 1 else (self(inputs, hidden[0])[0][None],)


class LinearCell(Cell):
    r"""Recurrent layers that add up evidence: :math:`z_t = \lambda \odot z_{t-1} + W x_t`, and :math:`z_t + D x_t` as output.

    What the layers before it make of one step is weighed and summed, each sum with a learned time constant. That is what beliefs
    do (log-odds of independent observations add up), no gradient vanishes on the way, and a pass over T steps takes
    log2 T operations instead of T. Arguments are those of ``torch.nn.GRU``.

    :param input_size: number of inputs
    :param hidden_size: number of sums
    :param num_layers: number of layers, with ReLU between them
    :param max_time: the longest of the initial time constants, in steps; the shortest is a thousandth of it
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, max_time: float = 300.0) -> None:
        super().__init__()
        check(0 < max_time < float("inf"), f"`max_time` must be positive and finite, got {max_time}")
        self.output_size = hidden_size
        sizes = [input_size] + [hidden_size] * num_layers
        self.inputs = nn.ModuleList(nn.Linear(size, hidden_size) for size in sizes[:-1])
        self.skips = nn.ModuleList(nn.Linear(size, hidden_size, bias=False) for size in sizes[:-1])
        times = th.logspace(-3, 0, hidden_size) * max_time
        self.log_times = nn.Parameter(times.log().repeat(num_layers, 1))

    def initial(self, batch_size: int, device: th.device) -> Hidden:
        return (th.zeros(len(self.inputs), batch_size, self.output_size, device=device),)

    def recur(self, inputs: th.Tensor, hidden: Hidden) -> tuple[th.Tensor, Hidden]:
        outputs, sums = self._scan(inputs, hidden[0])
        return outputs, (th.stack([z[-1] for z in sums]),)

    def states(self, inputs: th.Tensor, hidden: Hidden) -> Hidden:
        return (th.stack(self._scan(inputs, hidden[0])[1]),)

    def _scan(self, inputs: th.Tensor, hidden: th.Tensor) -> tuple[th.Tensor, list[th.Tensor]]:
        """Outputs ``(T, B, hidden_size)`` and the memory after every step, in each layer ``(T, B, hidden_size)``."""
        sums: list[th.Tensor] = []
        for weigh, skip, log_time, before in zip(self.inputs, self.skips, self.log_times, hidden, strict=True):
            inputs = F.relu(inputs) if sums else inputs
            decay = th.exp(-th.exp(-log_time))
            # the variance of a sum does not depend on its time constant
            sums.append(linear_scan(weigh(inputs) * (1 - decay.square()).sqrt(), decay, before))
            inputs = sums[-1] + skip(inputs)
        return inputs, sums


class NoMemory(Cell):
    """Nothing is remembered: the contextual agent of the paper's ablation. Takes the arguments of the others."""

    has_memory = False
    n_parts = 0

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, **kwargs: Any) -> None:
        super().__init__()
        self.output_size = input_size

    def initial(self, batch_size: int, device: th.device) -> Hidden:
        return ()

    def recur(self, inputs: th.Tensor, hidden: Hidden) -> tuple[th.Tensor, Hidden]:
        return inputs, ()

    def states(self, inputs: th.Tensor, hidden: Hidden) -> Hidden:
        return ()


#: the names by which users choose a memory
CELLS: dict[str, type[Cell]] = {"lstm": LstmCell, "gru": GruCell, "linear": LinearCell, "none": NoMemory}
