"""Training loop: rows from the data processes, two optimizers, scores and checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.demo_model import packing
from tools.demo_model.checkpoint import load_weights, save_checkpoint
from tools.demo_model.network import Network, NetworkShape, rotary_tables, summed_loss
from tools.demo_model.optimizer import Optimizer, learning_rate_factor
from tools.demo_model.scoring import match_rates
from tools.demo_model.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

Loss = Callable[[Network, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Number of shards in a pool: on the GPU many more than a step needs, so that steps differ.
POOL_SHARDS = {"cuda": 200, "cpu": 8}
FIRST_SHARDS = 8


@dataclass
class Pool:
    """Rows of training data in the device's memory, from which steps sample."""

    rows: torch.Tensor
    """int32 of shape (capacity, length)."""
    written: int = 0
    """Number of rows added so far; beyond the capacity each replaces the oldest one."""

    def add(self, fresh: packing.Rows) -> None:
        """Store rows, uint16 of shape (count, length); a full pool loses its oldest rows."""
        new = torch.from_numpy(fresh.astype("int32")).to(self.rows.device, non_blocking=True)
        places = (self.written + torch.arange(len(new))) % len(self.rows)
        self.rows[places.to(self.rows.device)] = new
        self.written += len(new)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return `count` random rows, of which some may be equal: int32 of shape (count, length).

        Args:
            count: number of rows.
            generator: source of the random numbers.
        """
        filled = min(self.written, len(self.rows))
        places = torch.randint(0, filled, (count,), generator=generator)
        return self.rows[places.to(self.rows.device)]


@dataclass
class Training:
    """State of one run of the training, which computes gradients, reports and saves."""

    options: argparse.Namespace
    """Parsed command line of tools/train_demo_model.py."""
    network: Network
    device: torch.device
    loss: Loss
    """Returns the summed loss of rows, as `summed_loss` does; it may be compiled."""
    tables: tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines of all positions, from `rotary_tables`."""
    step: int = 0
    """Number of finished steps."""
    began: float = field(default_factory=time.monotonic)
    """Time of the monotonic clock at which the run began, in seconds."""

    def progress(self) -> float:
        """Return the finished share of the run, 0..1."""
        minutes, steps = self.options.minutes, self.options.steps
        if minutes is not None:
            return min(1.0, (time.monotonic() - self.began) / (60 * float(minutes)))
        return min(1.0, self.step / int(steps))

    def backward(self, rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Compute the loss of rows, and add its gradients to those of the network.

        Args:
            rows: token ids, int32 of shape (count, length); bit 15 marks a learned token.
            total: number of learned tokens in all rows of the step, a scalar.

        Returns:
            The rows' part of the step's mean loss per learned token, a scalar.
        """
        cos, sin = (table[: rows.shape[1]] for table in self.tables)
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            loss = self.loss(self.network, rows, cos, sin) / total
        loss.backward()
        return loss.detach()

    def warm_up(self) -> None:
        """Compile the loss for both lengths of rows on a GPU, then restart the run's clock."""
        counts = {packing.SHORT_ROW: self.options.short_rows}
        counts[packing.LONG_ROW] = self.options.long_rows
        for length, count in counts.items():
            if self.device.type == "cuda":
                rows = torch.full((count, length), 0x8000, dtype=torch.int32, device=self.device)
                self.report(f"compiled for {length}: {float(self.backward(rows, rows[0, 0])):.3f}")
        self.network.zero_grad(set_to_none=True)
        self.began = time.monotonic()

    def report(self, text: str) -> None:
        """Print a line with the step and the seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f} s, step {self.step}] {text}", flush=True)

    def score(self, folder: Path) -> None:
        """Print the share of right answers for each held-out set, and save the checkpoint.

        Args:
            folder: the checkpoint's folder, which holds the tokenizer.
        """
        found = match_rates(self.network, load_tokenizer(folder), self.options.score_count)
        self.report(", ".join(f"{name} {rate:.3f}" for name, rate in found.items()))
        save_checkpoint(self.network, folder)


def _pools(device: torch.device, shape: packing.ShardShape) -> tuple[Pool, Pool]:
    """Return empty pools for the short and the long rows."""
    shards = POOL_SHARDS[device.type]
    sizes = (
        (shards * shape.short_rows, packing.SHORT_ROW),
        (shards * shape.long_rows, packing.LONG_ROW),
    )
    short, long = (Pool(torch.zeros(size, dtype=torch.int32, device=device)) for size in sizes)
    return short, long


def run_steps(training: Training) -> None:
    """Train until the time or the number of steps in the options is reached.

    It prints the loss every 200 steps, and scores and saves the model at intervals.
    """
    options = training.options
    shape = packing.ShardShape(
        max(1, options.short_rows // options.reuse), max(1, options.long_rows // options.reuse)
    )
    stream = packing.shards(options.out, options.seed, options.workers, shape)
    short, long = _pools(training.device, shape)
    optimizer = Optimizer(training.network, options.matrix_rate, options.other_rate)
    generator = torch.Generator().manual_seed(options.seed)
    scored = training.began
    while (progress := training.progress()) < 1.0:
        for _ in range(FIRST_SHARDS if training.step == 0 else 1):
            fresh_short, fresh_long = next(stream)
            short.add(fresh_short)
            long.add(fresh_long)
        parts = [short.draw(options.short_rows, generator)]
        if progress >= options.long_from:
            parts.append(long.draw(options.long_rows, generator))
        total = torch.stack([(part >= 0x8000).sum() for part in parts]).sum()
        losses = [training.backward(part, total) for part in parts]
        optimizer.step(learning_rate_factor(progress))
        training.step += 1
        if training.step % 200 == 1:
            training.report("loss " + " + ".join(f"{float(loss):.5f}" for loss in losses))
        if time.monotonic() - scored > options.score_every:
            training.score(options.out)
            scored = time.monotonic()


def train(options: argparse.Namespace) -> None:
    """Make the tokenizer unless one is kept, then train, score and save the model.

    Args:
        options: parsed command line of tools/train_demo_model.py.
    """
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not options.keep_tokenizer:
        save_tokenizer(train_tokenizer(), options.out)
    shape = NetworkShape(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
    )
    network = Network(shape).to(device)
    if options.resume is not None:
        load_weights(network, options.resume)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"{parameters:,} parameters on {device}", flush=True)
    loss: Loss = summed_loss if options.no_compile else torch.compile(summed_loss, dynamic=False)
    tables = rotary_tables(packing.LONG_ROW, network.shape, device)
    training = Training(options, network, device, loss, tables)
    training.warm_up()
    run_steps(training)
    training.report("done")
    training.score(options.out)
