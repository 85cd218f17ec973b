"""What goes on working over tensor-parallel parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import composable.fsdp2 as fsdp2
from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    fully_shard,
    keep_unsharded,
    no_sync,
    replicate,
)
from composable.api.checks import refuse_dtensor_offload
from composable.comm.backends import comms_wrapped_by
from composable.contract.tree import managed_parameters
from composable.errors import AnnotationError
from composable.optim.shard_steps import step_on_shards
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    GPT,
    MLP,
    Block,
    assert_same_parameters,
    assert_trains_as_one_process,
    batches,
    full,
    loss_of,
    made,
    mesh_of,
    parallelize_gpt,
    parallelize_mlp,
    train,
)


def _annotated(mesh: Any, **options: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT().double()
    parallelize_gpt(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block}, **options)
    return model


@spmd(ranks=4)
def test_compiled_blocks_train_as_one_process() -> None:
    mesh = mesh_of(2, 2)
    model = made(lambda: nn.Sequential(MLP(), MLP()))
    alone = copy.deepcopy(model)
    for block in model:  # type: ignore[attr-defined]
        # torch cannot compile DTensors that modules give to each other, with or without shards
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], policy={MLP})
    for block in model:  # type: ignore[attr-defined]
        block.compile(backend="aot_eager", fullgraph=True)
    train(model, batches(model, mesh["dp"].get_local_rank(), 2, 2))
    train(alone, batches(alone, -1, 2, 2))
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_a_loss_of_sharded_outputs_has_the_gradients_of_one_process() -> None:
    mesh = mesh_of(2, 2)
    model = made(MLP)
    alone = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(output_layouts=Replicate())}
    plan["down"] = ColwiseParallel(use_local_output=False)  # each rank has scores of some classes
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    classes, rank = torch.tensor([0, 3, 5, 1]), mesh["dp"].get_local_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    with loss_parallel():
        nn.functional.cross_entropy(model(x[mine]), classes[mine]).backward()
    nn.functional.cross_entropy(alone(x), classes).backward()
    for (name, parameter), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), plain.grad, msg=name)  # type: ignore[arg-type]


@spmd(ranks=4)
def test_hooks_of_parameters_see_reduced_gradients() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    model, alone = _annotated(mesh), made(GPT)
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def double(gradient: Tensor) -> Tensor:
            return gradient * 2.0

        def note(parameter: Tensor) -> None:
            seen.setdefault(name, []).append(full(parameter.grad))  # type: ignore[arg-type]

        return double, note

    for kind, each in (("ours", model), ("alone", alone)):
        double, note = hook(kind)
        for weight in (each.blocks[0].mlp.up.weight, each.norm.weight):  # type: ignore[union-attr]
            weight.register_hook(double)
            weight.register_post_accumulate_grad_hook(note)
    loss_of(model, batches(model, rank, 2, 1)[0]).backward()
    loss_of(alone, batches(alone, -1, 2, 1)[0]).backward()
    # in the order of units
    ours, expected = (sorted(seen[kind], key=Tensor.numel) for kind in ("ours", "alone"))
    torch.testing.assert_close(ours, expected)


@spmd(ranks=4)
def test_optimizers_step_on_shards_and_in_backward() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    alone = made(GPT)
    train(alone, batches(alone, -1, 2, 3), "AdamW")
    model = _annotated(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    step_on_shards(optimizer)
    for batch in batches(model, rank, 2, 3):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(model, alone)
    model = _annotated(mesh)
    apply_optimizer_in_backward(
        torch.optim.AdamW, model.parameters(), {"lr": 0.01, "weight_decay": 0.1}
    )
    for batch in batches(model, rank, 2, 3):
        loss_of(model, batch).backward()
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_a_scaler_skips_on_all_ranks_if_one_overflows() -> None:
    mesh = mesh_of(2, 2)
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    batch = batches(model, mesh["dp"].get_local_rank(), 2, 1)[0]
    for overflows in (True, False):
        scaler.scale(loss_of(model, batch)).backward()
        grad = model.up.weight.grad  # type: ignore[union-attr]
        assert isinstance(grad, DTensor)
        if overflows and torch.distributed.get_rank() == 3:
            grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(full(p), before[name]) for name, p in model.named_parameters())
        assert same is overflows
        assert scaler.get_scale() == 2.0


@spmd(ranks=4)
def test_parameters_may_stay_unsharded_for_some_forwards() -> None:
    mesh = mesh_of(2, 2)
    model, alone = _annotated(mesh), made(GPT)
    batch = batches(model, mesh["dp"].get_local_rank(), 2, 1)[0]
    with keep_unsharded(model), torch.no_grad():
        torch.testing.assert_close(loss_of(model, batch), loss_of(alone, batch))
        torch.testing.assert_close(loss_of(model, batch), loss_of(alone, batch))
    train(model, batches(model, mesh["dp"].get_local_rank(), 2, 1))
    train(alone, batches(alone, -1, 2, 1))
    assert_same_parameters(model, alone)


@spmd(ranks=[2, 4])
def test_a_graph_from_before_a_step_is_refused() -> None:
    mesh = mesh_of(torch.distributed.get_world_size() // 2, 2)
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batches(model, mesh["dp"].get_local_rank(), mesh["dp"].size(), 1)[0]
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@spmd(ranks=4)
def test_a_plain_part_may_be_replicated() -> None:
    mesh = mesh_of(2, 2)

    def annotate(model: nn.Module) -> None:
        layers = list(model.children())
        parallelize_mlp(layers[1], mesh["tp"])
        replicate(layers[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"], policy={MLP})

    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), MLP(), nn.Linear(6, 6))

    assert_trains_as_one_process(kind, annotate, mesh["dp"])


@spmd(ranks=4)
def test_a_llama_trains_as_one_process() -> None:
    transformers = pytest.importorskip("transformers")
    mesh = mesh_of(2, 2)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=2, vocab_size=12, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip

    def built() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()

    model, alone = built(), built()
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )
    fully_shard(model, mesh=mesh["dp"], policy=model)
    generator = torch.Generator().manual_seed(0)
    rank = mesh["dp"].get_local_rank()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone)]
    for _ in range(3):
        tokens = torch.randint(12, (4, 6), generator=generator)
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            rows = tokens[2 * rank : 2 * rank + 2] if each is model else tokens
            each(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_scripts_written_for_fsdp2_train_as_one_process() -> None:
    mesh = mesh_of(2, 2)

    def annotate(model: nn.Module) -> None:
        parallelize_gpt(model, mesh["tp"])  # type: ignore[arg-type]
        for block in model.blocks:  # type: ignore[union-attr]
            fsdp2.fully_shard(block, mesh=mesh["dp"])
        fsdp2.fully_shard(model, mesh=mesh["dp"])

    assert_trains_as_one_process(GPT, annotate, mesh["dp"])


@spmd(ranks=4)
def test_torchs_functions_take_and_set_whole_state_dicts() -> None:
    mesh = mesh_of(2, 2)
    model, alone = _annotated(mesh), made(GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, batches(model, mesh["dp"].get_local_rank(), 2, 1)[0]).backward()
    optimizer.step()
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
    ):
        found, steps = get_state_dict(model, optimizer, options=options)
        assert bool(found) is (torch.distributed.get_rank() == 0 or not options.cpu_offload)
        if found:
            alone.load_state_dict(found)
        assert_same_parameters(model, alone)
        moments = _whole_moments(optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        # torch's function for both at once skips the model on ranks with nothing of it
        set_model_state_dict(model, found, options=options)
        set_optimizer_state_dict(model, optimizer, steps, options=options)
        assert_same_parameters(model, alone)
        torch.testing.assert_close(_whole_moments(optimizer), moments)


def _whole_moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [full(state["exp_avg"]) for state in optimizer.state.values()]


class _Sums(nn.Module):
    """Weights of several shapes: the gradient of each element is the sum of `x`."""

    def __init__(self, tp: DeviceMesh | None) -> None:
        super().__init__()
        shapes = ((3,), (5, 3), (), (2, 3), (1, 4))
        for number, shape in enumerate(shapes):
            weight: Any = torch.ones(shape)
            if tp is not None and number % 2:
                weight = distribute_tensor(weight, tp, [Replicate()])
            self.register_parameter(str(number), nn.Parameter(weight))

    def forward(self, x: Tensor, distributed: Any) -> Tensor:
        sums = [
            weight.sum() * (distributed if isinstance(weight, DTensor) else x)
            for weight in self.parameters()
        ]
        return torch.stack([full(each.sum()).float() for each in sums]).sum()


@pytest.mark.parametrize("how", ["rows", "columns", "hybrid", "replicate"])
@spmd(ranks=4)
def test_sums_over_tensor_parallel_ranks_are_made_in_the_reduce_dtype(how: str) -> None:
    dims = ("replicate", "shard", "tp") if how == "hybrid" else ("dp", "tp")
    mesh = mesh_of(*((2, 1, 2) if how == "hybrid" else (2, 2)), names=dims)
    policy = MixedPrecisionPolicy("bf16", "fp32")
    mine = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)  # which has no 257
    inputs = mine[:1], distribute_tensor(mine, mesh["tp"], [Shard(0)])
    for between in ("zero_grad", "nothing", "no_sync"):
        model: Any = _Sums(mesh["tp"])
        if how == "replicate":
            replicate(model, mesh=mesh["dp"], mp_policy=policy)
        elif how == "hybrid":
            fully_shard(model, mesh=mesh["replicate", "shard"], mp_policy=policy)
        else:
            place = (lambda p: Shard(p.ndim - 1) if p.ndim else None) if how == "columns" else None
            fully_shard(model, mesh=mesh["dp"], mp_policy=policy, shard_placement_fn=place)
        expected = 0
        for step in range(3):
            waits = between == "no_sync" and step == 1
            with no_sync(model, enabled=waits):
                model(*inputs).backward()
            expected += 1
            for name, parameter in model.named_parameters() if not waits else ():
                value = expected * (257.0 if int(name) % 2 else 256.0)
                assert (full(parameter.grad) == value).all(), (name, between)
            if between == "zero_grad":
                model.zero_grad()
                expected = 0


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11's redistribution looks for dimensions of the mesh in another order",
)
@spmd(ranks=2)
def test_offload_on_an_accelerator_is_refused_and_has_no_effect_on_hosts() -> None:
    mesh = mesh_of(1, 2)
    model, plain = made(MLP), made(MLP)
    parallelize_mlp(model, mesh["tp"])
    with pytest.raises(AnnotationError, match="is tensor parallel, and offload_policy"):
        refuse_dtensor_offload(managed_parameters([model]), torch.device("cuda"))
    refuse_dtensor_offload(managed_parameters([plain]), torch.device("cuda"))
    log = Log()
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        fully_shard(model, mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())
    train(model, batches(model, 0, 1, 1))
    train(plain, batches(plain, 0, 1, 1))
    assert_same_parameters(model, plain)
    assert not log.events  # over one data-parallel rank nothing is sent


@spmd(ranks=2)
def test_ignored_parameters_of_other_ranks_are_not_asked_for() -> None:
    mesh = mesh_of(1, 2)
    model = made(MLP)
    parallelize_mlp(model, mesh["tp"])
    if dist.get_rank() == 0:  # the other rank of the ignored parameters' mesh takes no part
        fully_shard(model, mesh=mesh["dp"], ignored_params="*")
