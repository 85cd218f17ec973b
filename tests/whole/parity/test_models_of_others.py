"""Models from other people's libraries, built from configurations, train annotated as they do in
one process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.longt5.modeling_longt5 import LongT5Block
from transformers.models.mamba.modeling_mamba import MambaBlock
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersBlock,
)
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer, WhisperEncoderLayer

from composable import checkpoint, fully_shard, keep_unsharded, remove, replicate
from composable.policies import select_modules
from tests.helpers.compare import assert_mean_gradients, averaged_gradients, sgd
from tests.helpers.world import current_device, spmd

_WORDS: Final = 37
_ENCODER_DECODER: Final[dict[str, Any]] = {
    "vocab_size": _WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def _translate(model: nn.Module, generator: torch.Generator) -> Tensor:
    inputs, labels = (
        torch.randint(3, _WORDS, (2, length), generator=generator) for length in (12, 5)
    )
    return model(input_ids=inputs.to(current_device()), labels=labels.to(current_device())).loss


def _continue(model: nn.Module, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(3, _WORDS, (2, 9), generator=generator).to(current_device())
    return model(input_ids=tokens, labels=tokens).loss


def _transcribe(model: nn.Module, generator: torch.Generator) -> Tensor:
    sound = torch.randn(2, 6, 16, generator=generator, dtype=next(model.parameters()).dtype)
    labels = torch.randint(3, _WORDS, (2, 5), generator=generator)
    return model(input_features=sound.to(current_device()), labels=labels.to(current_device())).loss


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_ENCODER_DECODER))


def _long_t5() -> nn.Module:
    local = {
        "local_radius": 3,
        "encoder_attention_type": "transient-global",
        "global_block_size": 4,
    }
    return transformers.LongT5ForConditionalGeneration(
        transformers.LongT5Config(**_ENCODER_DECODER, **local)
    )


def _switch() -> nn.Module:
    experts = {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 2,
        "expert_capacity": 8,
    }
    config = transformers.SwitchTransformersConfig(
        **_ENCODER_DECODER, **experts, router_jitter_noise=0.0
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=_WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return transformers.MambaForCausalLM(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=_WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=_WORDS, num_mel_bins=6, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_source_positions=8, max_target_positions=16, dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _dora() -> nn.Module:
    targets = ["q_proj", "v_proj", "up_proj"]
    config = LoraConfig(r=2, lora_alpha=4, use_dora=True, target_modules=targets, lora_dropout=0.0)
    with warnings.catch_warnings():
        # peft asks transformers by a name that is going away
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(_llama(), config)


class Critic(nn.Module):
    """The critic of an adversarial pair, with its penalty on the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv1d(c, c + 2, 3, padding=1), nn.SiLU()) for c in (2, 4, 6)]
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1))


def _criticise(model: nn.Module, generator: torch.Generator) -> Tensor:
    dtype = next(model.parameters()).dtype
    real, fake = (
        torch.randn(3, 2, 8, generator=generator, dtype=dtype).to(current_device())
        for _ in range(2)
    )
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (
        model(fake).mean()
        - model(real).mean()
        + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    )


@dataclass(frozen=True)
class Foreign:
    """How a model is made and used, and the classes of its blocks."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    blocks: tuple[type[nn.Module], ...]
    dtype: torch.dtype = torch.float64


MODELS: Final[dict[str, Foreign]] = {
    "T5": Foreign(_t5, _translate, (T5Block,)),
    "LongT5": Foreign(_long_t5, _translate, (LongT5Block,)),
    # Its routers cast themselves to single precision when they compute.
    "Switch Transformers": Foreign(_switch, _translate, (SwitchTransformersBlock,), torch.float32),
    "Mamba": Foreign(_mamba, _continue, (MambaBlock,)),
    "Llama": Foreign(_llama, _continue, (LlamaDecoderLayer,)),
    "GPT-2": Foreign(_gpt2, _continue, (GPT2Block,)),
    "Whisper": Foreign(_whisper, _transcribe, (WhisperEncoderLayer, WhisperDecoderLayer)),
    "DoRA": Foreign(_dora, _continue, (LlamaDecoderLayer,)),
    "a critic with a gradient penalty": Foreign(Critic, _criticise, (nn.Sequential,)),
}


def _checkpointed(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> None:
    checkpoint(model, policy=set(blocks))
    fully_shard(model, policy=set(blocks))


WAYS: Final[dict[str, Callable[..., object]]] = {
    "by block": lambda model, blocks: fully_shard(model, policy=set(blocks)),
    "kept after forward": lambda model, blocks: fully_shard(
        model, policy=set(blocks), reshard_after_forward=False
    ),
    "as one unit": lambda model, blocks: fully_shard(model),
    "with checkpoints": _checkpointed,
    "as the model says": lambda model, blocks: fully_shard(model, policy=model),
}
_CASES: Final = [
    (name, way)
    for name in MODELS
    for way in WAYS
    if way != "with checkpoints" or name in ("T5", "Mamba", "DoRA")
    if way != "as the model says" or MODELS[name].build is not Critic
]


# What a model names: layers, and embeddings that are not tied.
_NAMED: Final = {
    "T5": ["T5Block"] * 4,
    "Llama": ["LlamaDecoderLayer"] * 2,
    "GPT-2": ["GPT2Block"] * 2,
    "DoRA": ["LlamaDecoderLayer"] * 2,
    "Whisper": ["WhisperEncoderLayer"] * 2 + ["WhisperDecoderLayer"] * 2,
}


@pytest.mark.parametrize("name", _NAMED)
def test_a_model_names_its_units(name: str) -> None:
    model = MODELS[name].build()
    picked = select_modules(model, model)
    assert [type(module).__name__ for module in picked] == _NAMED[name]


def test_embeddings_of_their_own_are_units_and_the_kept_ends_are_not() -> None:
    config = transformers.LlamaConfig(
        vocab_size=_WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    names = {module: name for name, module in model.named_modules()}
    picked = [names[module] for module in select_modules(model, model)]
    assert picked == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert list(select_modules(model, model.model.layers)) == list(model.model.layers)


def _made(foreign: Foreign) -> nn.Module:
    torch.manual_seed(0)
    return foreign.build().to(current_device(), foreign.dtype).train()


@pytest.mark.parametrize(("name", "way"), _CASES)
@spmd(ranks=2)
def test_training_is_that_of_one_process(name: str, way: str) -> None:
    foreign = MODELS[name]
    plain, annotated = _made(foreign), _made(foreign)
    WAYS[way](annotated, foreign.blocks)
    optimizers = [sgd(plain), sgd(annotated)]
    exact = foreign.dtype is torch.float64
    for step in range(2):
        losses = []
        for model in (plain, annotated):
            generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
            loss = foreign.loss(model, generator)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        assert_mean_gradients(
            plain, annotated, step, rtol=1e-7 if exact else 1e-3, atol=1e-10 if exact else 1e-5
        )
        for parameter, gradient in zip(
            plain.parameters(), averaged_gradients(plain).values(), strict=True
        ):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _generated(model: Any, tokens: Tensor, more: int) -> Tensor:
    lengths = {"max_new_tokens": more, "min_new_tokens": more}
    return model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **lengths
    )


def _root_replicated(model: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    replicate(model)


@spmd(ranks=2)
def test_generate_with_other_lengths_on_each_rank_is_that_of_one_process() -> None:
    tokens, more = torch.tensor([[4, 5, 6]], device=current_device()), 2 + 3 * dist.get_rank()
    annotations: list[Callable[[Any], object]] = [
        lambda model: fully_shard(model, policy={LlamaDecoderLayer}),
        _root_replicated,
    ]
    for annotate in annotations:
        plain, model = (_made(Foreign(_llama, _continue, ())).eval() for _ in range(2))
        annotate(model)
        assert torch.equal(_generated(model, tokens, more), _generated(plain, tokens, more))
        assert torch.equal(_generated(model, tokens, 2), _generated(plain, tokens, 2))
        with keep_unsharded(model):  # where ranks need not even generate together
            if dist.get_rank():
                assert torch.equal(_generated(model, tokens, more), _generated(plain, tokens, more))


@spmd(ranks=2)
def test_an_encoder_that_generate_calls_by_itself_has_whole_parameters_in_keep_unsharded() -> None:
    tokens, more = torch.arange(2, 10, device=current_device())[None], 2 + 3 * dist.get_rank()
    plain, model = (_made(Foreign(_t5, _translate, ())).eval() for _ in range(2))
    fully_shard(model, policy={T5Block})
    with keep_unsharded(model):
        assert torch.equal(_generated(model, tokens, more), _generated(plain, tokens, more))


@spmd(ranks=2)
def test_what_tells_transformers_of_shards_is_taken_back_and_is_in_no_copy() -> None:
    model = _made(Foreign(_llama, _continue, ()))
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    states = list(model.state_dict())
    assert not is_fsdp_managed_module(model)
    for verb, managed in ((fully_shard, True), (replicate, False)):
        verb(model, policy={LlamaDecoderLayer})
        assert [is_fsdp_managed_module(module) for module in model.modules()] == [managed] * len(
            list(model.modules())
        )
        with keep_unsharded(model) if managed else nullcontext():
            assert not is_fsdp_managed_module(model)
        assert not is_fsdp_managed_module(copy.deepcopy(model.model.rotary_emb))
        assert list(model.state_dict()) == states
        remove(model, verb)
        assert {name: list(vars(module)) for name, module in model.named_modules()} == before
