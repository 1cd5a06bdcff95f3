"""What the aleatoric and the epistemic flow share: zuko, imported without its side effect, and state dicts SB3 can handle."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.distributions import Distribution

# Importing zuko switches off the argument checks of torch.distributions for the whole process: put back what was there before.
_VALIDATE_ARGS = bool(Distribution._validate_args)
import zuko  # noqa: E402

Distribution.set_default_validate_args(_VALIDATE_ARGS)

__all__ = ["float_state", "standard_normal_log_prob", "zuko"]

LOG_2PI = math.log(2 * math.pi)


def float_state(module: nn.Module) -> None:
    """Leave only floating-point tensors in the state dict of a module.

    Masks and permutations are functions of the constructor's arguments, so nothing is lost, and SB3's tools may treat every
    entry of a state dict as a number.

    :param module: the module, changed in place
    """
    for child in module.modules():
        names = [name for name, buffer in child.named_buffers(recurse=False) if not buffer.is_floating_point()]
        child._non_persistent_buffers_set.update(names)


def standard_normal_log_prob(z: Tensor) -> Tensor:
    r""":math:`-\tfrac{1}{2} z^2 - \tfrac{1}{2} \log 2\pi`, elementwise."""
    return -0.5 * z.square() - 0.5 * LOG_2PI
