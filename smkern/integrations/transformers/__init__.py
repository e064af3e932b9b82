"""smkern in Hugging Face transformers (5.17 and later): attention and linear layers.

    import smkern.integrations.transformers as st
    from transformers import AutoModelForCausalLM

    st.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16",
                                                 attn_implementation="smkern").cuda().eval()
    st.swap_linear(model)
    with torch.no_grad(), split.decode:              # on the SMs of this partition alone
        model.generate(**inputs, max_new_tokens=64)

Attention reads the cache of transformers where it lies: a dense [batch, kv_heads, S, head_dim]
tensor is seen as pages by its strides, a row's page table leaves its padding out, and the plan is
made once a forward, by the first layer. DynamicCache and StaticCache, left padding, sliding
windows, softcap (Gemma 2), sinks (GPT-OSS) and bidirectional layers are served. Weights must be
bf16 or fp16 on a GPU.

The rest:

| what | what happens |
| --- | --- |
| masks of another form: 4-D tensors, packed sequences, chunked attention, image blocks, padding between new tokens | transformers' sdpa, with a RuntimeWarning; ArgumentError with `register(fallback=False)`, or where the layer has softcap or sinks |
| dropout, a training forward with gradients, `output_attentions`, a position bias, `generate_batch` | ArgumentError with the remedy |
| head dims other than 64, 96, 128, 256; other head dims of K than of V | ArgumentError |
| rows of padding | what comes out there is not what eager computes there; no token that counts sees it |
| K and V whose rows lie differently | copied, then served |
| `torch.compile` | the graph breaks around attention; `fullgraph=True` cannot be |

A forward of several tokens with padding waits for the device once, as sdpa's own mask does.

For a runtime that launches a model a layer at a time over pages of its own there is `Layers`:

    layers = st.Layers(model)                        # embed(step), layer(i, step), head(step)

The five lines of `swap_linear`, for a place of your own:

    class Linear(torch.nn.Linear):
        def forward(self, x):
            rows = smkern.gemm(x.flatten(0, -2), self.weight, bias=self.bias)
            return rows.unflatten(0, x.shape[:-1])
    for layer in model.modules():
        if type(layer) is torch.nn.Linear: layer.__class__ = Linear
"""  # noqa: E501

from __future__ import annotations

from smkern.integrations.transformers.attention import Attention, register_attention
from smkern.integrations.transformers.layers import Layers
from smkern.integrations.transformers.linear import Linear, swap_linear

__all__ = ["Layers", "Linear", "register", "swap_linear"]


def register(name: str = "smkern", *, fallback: bool = True) -> None:
    """Register the attention implementation and its mask function with transformers.

    Args:
        name: What `attn_implementation=` is to be called. Registering a name anew replaces it.
        fallback: Masks that cannot be served go to sdpa, with a warning; False: they raise.

    Raises:
        ImportError: transformers is absent, or older than 5.17.

    Example:
        >>> import torch, smkern.integrations.transformers as st
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> st.register()
        >>> config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=1,
        ...                      intermediate_size=64, vocab_size=32, pad_token_id=0,
        ...                      eos_token_id=None)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="smkern").eval()
        >>> model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False).shape
        torch.Size([1, 4])
    """
    register_attention(name, Attention(fallback=fallback))
