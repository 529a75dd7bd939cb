"""The learning rate of the original Transformer (Vaswani et al. 2017, 1706.03762, section 5.3, eq. 3).

    rate(n) = size^-1/2 min(n^-1/2, n warmup^-3/2)

It grows by the same amount with every step until step `warmup`, then falls with the inverse root of their number.
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def learning_rate(step: int, size: int, warmup: int = 4000) -> float:
    """The rate of an update; `step` counts from 1, `size` is the width of the model.

    Raises:
        ValueError: for a number below 1.
    """
    for name, value in (("step", step), ("size", size), ("warmup", warmup)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it counts from 1")
    return size**-0.5 * min(step**-0.5, step * warmup**-1.5)


def warm_up(optimizer: Optimizer, size: int, warmup: int = 4000, last_epoch: int = -1) -> LambdaLR:
    """Multiplies the rate of each group of parameters, 1 for the paper's own, with that of the step to come.

    torch counts from 0: before the first `scheduler.step()` it asks for 0, which is the paper's step 1.
    """
    return LambdaLR(optimizer, lambda done: learning_rate(done + 1, size, warmup), last_epoch)
