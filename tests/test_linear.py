"""Products on CPU: the fastest where nothing is lost by it, F.linear where something would be, and packed weights."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_llmarch.model import compat, generation, linear
from hf_llmarch.model.linear import Linear, packed
from tiny import assert_close, text, tiny_model

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
DTYPES = {torch.float32: "native", torch.bfloat16: "bf16"}


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> Linear:
    torch.manual_seed(0)
    return Linear(40, 24, bias=bias, dtype=dtype)


def exact(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The product in double precision."""
    product = x.double() @ module.weight.double().T
    return product if module.bias is None else product + module.bias.double()


def counted(product: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that a product is called with, from now on that of every processor."""
    seen: list[torch.Tensor] = []

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(weight)
        return product(x, weight, bias)

    monkeypatch.setattr(linear, "PRODUCTS", dict.fromkeys(DTYPES, run))
    return seen


def onednn_noted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that oneDNN's operator is called with from now on."""
    seen: list[torch.Tensor] = []

    def run(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(weight)
        return compat.ONEDNN_LINEAR(x, weight, *rest)

    monkeypatch.setattr(linear, "ONEDNN_LINEAR", run)
    return seen


@pytest.fixture(params=[pytest.param("by_onednn", marks=needs_onednn), "weight_first"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that each of our products is called with."""
    monkeypatch.setattr(linear, "SMALL", 0)
    return counted(getattr(linear, request.param), monkeypatch)


@needs_onednn
def test_the_private_operators_are_there() -> None:
    assert compat.ONEDNN_LINEAR is not None
    assert compat.ONEDNN_PACK is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 40), (2, 5, 40), (1, 1, 40), (0, 40)])
def test_the_product(dtype: torch.dtype, bias: bool, shape: tuple[int, ...], calls: list[torch.Tensor]) -> None:
    module, x = layer(dtype, bias), torch.randn(shape).to(dtype)
    with torch.no_grad():
        got = module(x)
        strided = module(x.flip(-1).mT.contiguous().mT) if x.dim() > 1 else None
    assert len(calls) == 1 + (strided is not None)
    assert got.dtype == dtype
    assert got.is_contiguous()
    if x.numel():
        assert_close(got, exact(module, x), DTYPES[dtype])
        if strided is not None:
            assert_close(strided, exact(module, x.flip(-1)), DTYPES[dtype])
    else:
        assert got.shape == (0, 24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_of_a_vector(dtype: torch.dtype, bias: bool) -> None:
    module, x = layer(dtype, bias), torch.randn(40).to(dtype)
    with torch.no_grad():
        assert_close(linear.of_vector(x, module.weight, module.bias), exact(module, x), DTYPES[dtype])


@needs_onednn
def test_a_small_weight_is_not_worth_onednn_s_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = onednn_noted(monkeypatch)
    x = torch.randn(3, 256)
    for rows in (256, 257):
        weight = torch.randn(rows, 256)
        assert_close(linear.by_onednn(x, weight, None), x.double() @ weight.double().T, "native")
    assert [weight.shape for weight in ran] == [(257, 256)]


# What the system says of a processor -> the products in place of F.linear, those of vectors, and the experts' methods
# in place of the host's grouped product.
PROCESSORS: dict[str, tuple[dict[str, str], ...]] = {
    "vendor_id : GenuineIntel\nflags : avx512f amx_bf16": (
        {"torch.bfloat16": "weight_first"},
        {"torch.float32": "of_vector", "torch.bfloat16": "of_vector"},
        {"torch.bfloat16": "batches"},
    ),
    "vendor_id : GenuineIntel\nflags : avx512f": ({}, {"torch.float32": "of_vector"}, {}),
    "vendor_id : AuthenticAMD\nflags : avx512f": (
        {"torch.float32": "by_onednn"},
        {"torch.float32": "by_onednn"},
        {"torch.float32": "segments"},
    ),
}
CHOICES = """
import json, pathlib, sys
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *args, **kwargs: (
    sys.argv[1] if str(path) == "/proc/cpuinfo" else read(path, *args, **kwargs)
)
from hf_llmarch.model import experts, linear
tables = [linear.PRODUCTS, linear.VECTOR_PRODUCTS]
products = [{str(dtype): product.__name__ for dtype, product in table.items()} for table in tables]
print(json.dumps([*products, {str(dtype): method for dtype, (method, _) in experts.FASTER.items()}]))
"""


@needs_onednn
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems describe a processor otherwise")
@pytest.mark.parametrize("processor", PROCESSORS, ids=["amx", "intel", "amd"])
def test_the_choice_follows_the_processor(processor: str) -> None:
    ran = subprocess.run([sys.executable, "-c", CHOICES, processor], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == list(PROCESSORS[processor])


def under_autocast(module: Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x)


def counting_flops(module: Linear, x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as counter:
        out = module(x)
    assert counter.get_total_flops() == 2 * x.shape[0] * 40 * 24
    return out


def mapped(module: Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(module)(x)


def forward_gradient(module: Linear, x: torch.Tensor) -> torch.Tensor:
    """A linear map's derivative in a direction is its value there, without the bias."""
    with torch.autograd.forward_ad.dual_level():
        out = module(torch.autograd.forward_ad.make_dual(torch.zeros_like(x), x))
        return torch.autograd.forward_ad.unpack_dual(out).tangent + module.bias


def traced(module: Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.trace(module, (x[:2],), check_trace=False)(x)


def compiled(module: Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(module, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("watcher", [under_autocast, counting_flops, mapped, forward_gradient, traced, compiled])
def test_torch_s_own_product_where_it_is_watched(
    watcher: Callable[[Linear, torch.Tensor], torch.Tensor], calls: list[torch.Tensor]
) -> None:
    module, x = layer(), torch.randn(3, 40)
    with torch.no_grad():
        got = watcher(module, x)
    assert not calls
    assert got.dtype == (torch.bfloat16 if watcher is under_autocast else torch.float32)
    assert_close(got, exact(module, x), "bf16" if watcher is under_autocast else "native")


def test_gradients_are_torch_s_own(calls: list[torch.Tensor]) -> None:
    module, x = layer(), torch.randn(3, 40, requires_grad=True)
    module(x).sum().backward()
    assert not calls
    assert_close(x.grad, module.weight.detach().sum(0).expand(3, 40), "native")


# -- packed weights --------------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed experts": EXPERTS,
    "linear experts": {**EXPERTS, "experts_layout": "linear"},
}


def in_onednn_layout(weights: list[torch.Tensor]) -> int:
    return sum(weight.layout == torch._mkldnn for weight in weights)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that oneDNN is called with, on a processor without AMX."""
    monkeypatch.setattr(linear, "AMX", False)
    return onednn_noted(monkeypatch)


def copies(model: nn.Module) -> list[Any]:
    return [module.copy for module in model.modules() if isinstance(module, Linear) and module.copy is not None]


@needs_onednn
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_serve_few_rows(kind: str, packs: list[torch.Tensor]) -> None:
    model = tiny_model(**KINDS[kind]).to(torch.bfloat16)
    many, one = text(batch=3, length=11), text(batch=1, length=1)
    with torch.no_grad():
        expected = [model(ids).logits for ids in (many, one)]
        assert not in_onednn_layout(packs)
        with packed(model):
            assert_close(model(many).logits, expected[0], "bf16")
            packs.clear()
            assert_close(model(one).logits, expected[1], "bf16")
            linears = 3 * (4 + (3 if kind == "dense" else 0)) + 1  # three layers, four of attention, and the head
            experts = 3 * 2 * 3 if kind == "linear experts" else 0
            assert in_onednn_layout(packs) == linears + experts
        assert not copies(model)


@needs_onednn
def test_generate_packs_a_text_that_gets_long(monkeypatch: pytest.MonkeyPatch, packs: list[torch.Tensor]) -> None:
    model, ids = tiny_model().to(torch.bfloat16), text(batch=1, length=5)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=generation.STEPS_UNPACKED, **settings)
    assert not in_onednn_layout(packs)
    long = model.generate(ids, max_new_tokens=20, **settings)
    products = 3 * 7 + 1
    assert in_onednn_layout(packs) == (20 - generation.STEPS_UNPACKED) * products
    assert not copies(model)
    packs.clear()
    monkeypatch.setattr(linear, "free_memory", lambda: 0)  # no room for a copy
    assert model.generate(ids, max_new_tokens=20, **settings).equal(long)
    assert not in_onednn_layout(packs)


@needs_onednn
def test_copies_end_with_an_error(packs: list[torch.Tensor]) -> None:
    model = tiny_model().to(torch.bfloat16)

    def stop() -> None:
        assert copies(model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), packed(model):
        stop()
    assert not copies(model)


def test_fp32_is_not_packed(packs: list[torch.Tensor]) -> None:
    model = tiny_model()
    with packed(model):
        assert not copies(model)


@needs_onednn
def test_nothing_is_packed_for_amx(monkeypatch: pytest.MonkeyPatch, packs: list[torch.Tensor]) -> None:
    monkeypatch.setattr(linear, "AMX", True)
    model = tiny_model().to(torch.bfloat16)
    with packed(model):
        assert not copies(model)


def test_a_linear_is_copied_and_pickled() -> None:
    module, x = layer(), torch.randn(3, 40)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(twin, nn.Linear)
        assert twin(x).equal(module(x))
