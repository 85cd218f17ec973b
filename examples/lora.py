"""Train LoRA adapters of PEFT on a frozen Hugging Face model; needs `pip install transformers
peft`.

torchrun --standalone --nproc-per-node=2 examples/lora.py
"""

import sys
import warnings

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from composable import describe, fully_shard

try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    print("peft is not installed, so there are no adapters to train: pip install peft")
    sys.exit(0)


def make_model():
    """Build the model. In your program, call `from_pretrained` instead."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["lm_head"],
    )
    with warnings.catch_warnings():
        # peft uses a deprecated name of transformers
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(LlamaForCausalLM(config), adapters)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model()
    fully_shard(model, policy={LlamaDecoderLayer})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(30):
        start = torch.randint(32, (16, 1))
        tokens = (start + torch.arange(8)) % 32
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:2}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        every = sum(parameter.numel() for parameter in model.parameters())
        print(f"{sum(parameter.numel() for parameter in trained)} of {every} elements are trained")
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
