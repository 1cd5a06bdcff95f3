"""What SB3's logger cannot write itself: layouts and animations go to TensorBoard's own writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["ONLY_TENSORBOARD", "add_gif", "summary_writer"]

ONLY_TENSORBOARD = ("stdout", "log", "json", "csv")  # what to leave out


def summary_writer(logger: Logger) -> SummaryWriter | None:
    """The writer of a logger's TensorBoard events, ``None`` where it writes none."""
    return next((output.writer for output in logger.output_formats if isinstance(output, TensorBoardOutputFormat)), None)


def add_gif(writer: SummaryWriter, tag: str, gif: bytes, size: tuple[int, int], step: int) -> None:
    """An animation among TensorBoard's images, as ``add_video`` does it, without the video library that it needs."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=gif)
    assert writer.file_writer is not None
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
    writer.flush()
