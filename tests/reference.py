"""PyTorch's logits and hidden states of a model, in float32 and in true float64.

`model.double()` alone is no float64 reference: transformers computes RMSNorm, softmax and rotary angles in float32
whatever the model's type. Here every request for float32 becomes one for float64, and a float result of another type
is an error. The stored float32 inverse frequencies define the model and keep their values.
"""
import contextlib
import os
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Float64(TorchDispatchMode):
    """Sees every tensor operation below autograd, whichever Python or C++ code asked for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                raise TypeError(f"{func} saw {leaf.dtype} in a float64 forward pass")
        return result


@contextlib.contextmanager
def settings(dtype, threads=1):
    """Number of threads and default type of torch (the type of 1 / an integer tensor), put back at the end."""
    old = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_num_threads(old[0])
        torch.set_default_dtype(old[1])


def load(source):
    """The model of a Hugging Face folder, a hub id or a GGUF file, in float32 with eager attention, on the CPU."""
    path, options = Path(source), {}
    if path.suffix == ".gguf":
        path, options = path.parent, {"gguf_file": path.name}
    name = str(path) if path.exists() else str(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="eager", **options)
    frequencies = [b for n, b in model.named_buffers() if n.endswith("inv_freq")]
    if any(b.dtype != torch.float32 for b in frequencies):
        raise TypeError("the model's inverse frequencies are not float32")
    return model.eval().requires_grad_(False)


def to_float64(model):
    """Widens the model in place; exact for every parameter and buffer."""
    model.double()
    for module in model.modules():  # longrope keeps its second table as a plain attribute
        for name, value in [*vars(module).items()]:
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.double())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            raise TypeError(f"{name} stayed {tensor.dtype}")
    return model


def forward(model, ids, **options):
    """Logits (T, vocab_size) and hidden states (n_layers + 1, T, dim) at every position, in the model's own type."""
    mode = Float64() if model.dtype == torch.float64 else contextlib.nullcontext()
    with settings(model.dtype), torch.no_grad(), mode:
        out = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False, **options)
        return out.logits[0].numpy(), np.stack([h[0].numpy() for h in out.hidden_states])


def references(source, sequences):
    """For each sequence of ids: the results of forward() in float32 and in float64."""
    model = load(source)
    single = [forward(model, ids) for ids in sequences]
    to_float64(model)
    return [(f32, forward(model, ids)) for f32, ids in zip(single, sequences)]


def random_ids(vocab_size, count, seed=1):
    """A fixed pseudo-random sequence of ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def exported(source, path):
    """Writes what `export.py source path` writes, in this process, which saves seconds of imports. -> path"""
    import export  # only the tests call this: conftest.py has put its folder on the path
    export.export(export.find_source(str(source)), Path(path))
    return Path(path)
