"""Models over meshes of several dimensions, annotated by the library and by FSDP2 alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable import fully_shard
from tests.meshes import test_context_parallel
from tests.meshes.mixtral import Mixtral, distribute_experts
from tests.tensor_parallel.models import GPT, VOCABULARY, WIDTH, made, mesh_of, parallelize_gpt


class Program:
    """What a model is trained on and how it is annotated. Here: GPT, tp 2.

    Attributes:
        mesh: of all dimensions.
        dp: those over which batches differ.
        tokens: whether batches are tokens.
    """

    names: tuple[str, ...] = ("dp", "tp")
    shape: tuple[int, ...] = (2, 2)
    tokens = True

    def __init__(self, *, compiled: bool = False) -> None:
        self.mesh, self.compiled = mesh_of(*self.shape, names=self.names), compiled
        self.dp = self.mesh[self.names[:-1]] if len(self.names) > 2 else self.mesh[self.names[0]]

    def make(self) -> Any:
        return made(GPT)

    def blocks(self, model: Any) -> Any:
        return model.blocks

    def distribute(self, model: Any) -> None:
        if not self.compiled:
            parallelize_gpt(model, self.mesh["tp"])
            return
        plan = {f"attention.{each}": ColwiseParallel() for each in "qkv"}
        plan |= {"attention.out": RowwiseParallel(), "mlp.up": ColwiseParallel()}  # type: ignore[dict-item]
        plan |= {"mlp.down": RowwiseParallel()}  # type: ignore[dict-item]
        for block in model.blocks:  # torch cannot compile DTensors that modules pass on
            parallelize_module(block, self.mesh["tp"], plan)

    def annotate(self, model: Any, verb: Callable[..., Any], **options: Any) -> None:
        self.distribute(model)
        for block in self.blocks(model):
            verb(block, mesh=self.dp, **options)
        verb(model, mesh=self.dp, **options)

    def inputs(self, number: int, *, alone: bool) -> Tensor:
        """A batch of this rank, or of all ranks."""
        ranks, generator = self.dp.size(), torch.Generator().manual_seed(number)
        if self.tokens:
            whole = torch.randint(VOCABULARY, (2 * ranks, 4), generator=generator)
        else:
            whole = torch.randn(2 * ranks, WIDTH, generator=generator, dtype=torch.float64)
        at = sorted(self.dp.mesh.flatten().tolist()).index(dist.get_rank())
        return whole if alone else whole[2 * at : 2 * at + 2]

    def backward(self, model: Any, number: int, *, alone: bool = False) -> Tensor:
        """The loss."""
        batch = self.inputs(number, alone=alone)
        if not self.tokens:
            batch = batch.to(next(model.parameters()).dtype)
        loss = self.loss(model, batch)
        loss.backward()
        return loss.detach()

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        if not self.tokens:
            return model(batch).square().mean()
        out = model(batch)
        return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class Hybrid(Program):
    names, shape = ("replicate", "shard", "tp"), (2, 2, 2)


class Llama(Program):
    def make(self) -> Any:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=2,
            num_hidden_layers=2, vocab_size=VOCABULARY, tie_word_embeddings=False,
            attn_implementation="eager", use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()

    def blocks(self, model: Any) -> Any:
        return model.model.layers

    def distribute(self, model: Any) -> None:
        plan: dict[str, Any] = {f"self_attn.{each}_proj": ColwiseParallel() for each in "qkv"}
        plan |= {f"mlp.{each}_proj": ColwiseParallel() for each in ("gate", "up")}
        plan |= {each: RowwiseParallel() for each in ("self_attn.o_proj", "mlp.down_proj")}
        for layer in model.model.layers:
            parallelize_module(layer, self.mesh["tp"], plan)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


class Experts(Program):
    """Experts over `ep` and sharded over the rest; all else sharded over all ranks."""

    names, tokens = ("efsdp", "ep"), False

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__(compiled=compiled)
        self.dp = self.mesh["efsdp", "ep"]._flatten("efsdp_ep")

    def make(self) -> Any:
        return made(Mixtral)

    def annotate(self, model: Any, verb: Callable[..., Any], **options: Any) -> None:
        distribute_experts(model, self.mesh["ep"])
        mean = {"grad_reduce": 4.0} if verb is fully_shard else {}  # tokens of all ranks
        for block in model.blocks:
            verb(block.experts, mesh=self.mesh["efsdp"], **mean, **options)
            verb(block, mesh=self.dp, **options)
        verb(model, mesh=self.dp, **options)
        if verb is fsdp2:
            for each in model.modules():
                if hasattr(each, "set_force_sum_reduction_for_comms"):  # for divisors on gloo
                    each.set_force_sum_reduction_for_comms(True)
                    each.set_gradient_divide_factor(4.0)


class Context(Program):
    """Sequences split over `cp`, parameters sharded over `dp` and `cp`."""

    names, tokens = ("dp", "cp"), False

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__(compiled=compiled)
        self.dp = self.mesh["dp", "cp"]._flatten("dp_cp")

    def make(self) -> Any:
        return made(lambda: nn.Sequential(*(test_context_parallel.Block() for _ in range(2))))

    def blocks(self, model: Any) -> Any:
        return list(model)

    def distribute(self, model: Any) -> None:
        pass

    def backward(self, model: Any, number: int, *, alone: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        length, width = test_context_parallel.LENGTH, test_context_parallel.WIDTH
        x = torch.randn(2, length, width, generator=generator, dtype=torch.float64)
        x = x.to(next(model.parameters()).dtype)
        at = self.mesh.get_local_rank("dp")
        x = x if alone else x[at : at + 1].clone()
        split = context_parallel(
            self.mesh["cp"], buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}
        )
        with nullcontext() if alone else split:
            loss = (model(x) - x.cos()).square().mean()
            loss.backward()
        return loss.detach()


PROGRAMS: Final[dict[str, type[Program]]] = {
    "GPT, dp 2 x tp 2": Program,
    "llama, dp 2 x tp 2": Llama,
    "Mixtral, dp 2 x ep 2": Experts,
    "dp 2 x cp 2": Context,
}
