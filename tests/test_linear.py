"""Products on CPU: the fastest where nobody could tell, F.linear where somebody could, and prepacked weights."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_llmarch.integrations import processors
from hf_llmarch.integrations.processors import prepacked
from hf_llmarch.model import generation
from hf_llmarch.model.linear import Linear, Products, linear
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


def use_for_all_dtypes(product: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one whose processor is fastest by `BY_ONEDNN` or `WEIGHT_FIRST`, or by neither."""
    for name in ("BY_ONEDNN", "WEIGHT_FIRST"):
        monkeypatch.setattr(processors, name, set(DTYPES) if name == product else set())


def noted(owner: Any, name: str, product: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that `owner.name` is called with from now on."""
    seen: list[torch.Tensor] = []

    def run(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(weight)
        return product(x, weight, *rest)

    monkeypatch.setattr(owner, name, run)
    return seen


def torch_s_own_noted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that are multiplied by F.linear from now on."""
    functions = SimpleNamespace(linear=F.linear)
    monkeypatch.setattr(processors, "F", functions)
    return noted(functions, "linear", F.linear, monkeypatch)


def onednn_noted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that oneDNN's operator is called with from now on."""
    return noted(processors, "ONEDNN_LINEAR", processors.ONEDNN_LINEAR, monkeypatch)


@pytest.fixture(params=[pytest.param("BY_ONEDNN", marks=needs_onednn), "WEIGHT_FIRST"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of our products, for weights of any size."""
    monkeypatch.setattr(processors, "SMALL", 0)
    use_for_all_dtypes(request.param, monkeypatch)
    return request.param


@needs_onednn
def test_the_private_operators_are_there() -> None:
    assert processors.ONEDNN_LINEAR is not None
    assert processors.ONEDNN_PREPACK is not None


def test_the_package_installs_its_products() -> None:
    assert isinstance(Linear.products, processors.ProcessorProducts)
    assert Linear.forward is processors.multiply


def test_without_the_package_products_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "products", Linear.products)
    monkeypatch.setattr(Linear, "forward", Linear.forward)
    own = torch_s_own_noted(monkeypatch)
    Linear.use(Products())
    module, x, model = layer(), torch.randn(3, 40), tiny_model().to(torch.bfloat16)
    with torch.no_grad(), Linear.products.prepacked(model):
        assert module(x).equal(F.linear(x, module.weight, module.bias))
        assert linear(x, module.weight).equal(F.linear(x, module.weight))
        assert not copies(model)
    assert not own  # none of them by way of the package


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 40), (2, 5, 40), (1, 1, 40), (0, 40)])
def test_the_product(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...], product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch_s_own_noted(monkeypatch)
    module, x = layer(dtype, bias), torch.randn(shape).to(dtype)
    rows = x.numel() // 40
    with torch.no_grad():
        got = module(x)
        strided = module(x.flip(-1).mT.contiguous().mT) if x.dim() > 1 else None
    fast = product == "BY_ONEDNN" or rows == 1 or (not bias and 1 < rows <= processors.FEW_ROWS)
    assert len(own) == (0 if fast else 2)
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
def test_the_product_of_a_vector(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any processor in fp32."""
    use_for_all_dtypes(None, monkeypatch)
    own = torch_s_own_noted(monkeypatch)
    module, x = layer(dtype, bias), torch.randn(40).to(dtype)
    with torch.no_grad():
        assert_close(module(x), exact(module, x), DTYPES[dtype])
    assert bool(own) == (dtype is not torch.float32)


@needs_onednn
def test_a_small_weight_is_not_worth_onednn_s_call(monkeypatch: pytest.MonkeyPatch) -> None:
    use_for_all_dtypes("BY_ONEDNN", monkeypatch)
    ran = onednn_noted(monkeypatch)
    x = torch.randn(3, 256)
    for rows in (256, 257):
        weight = torch.randn(rows, 256)
        with torch.no_grad():
            assert_close(linear(x, weight), x.double() @ weight.double().T, "native")
    assert [weight.shape for weight in ran] == [(257, 256)]


# What the system says of a processor -> the dtypes that are fastest by oneDNN's operator, and with the weight first.
PROCESSORS: dict[str, list[list[str]]] = {
    "vendor_id : GenuineIntel\nflags : avx512f amx_bf16": [[], ["torch.bfloat16"]],
    "vendor_id : GenuineIntel\nflags : avx512f": [[], []],
    "vendor_id : AuthenticAMD\nflags : avx512f": [["torch.float32"], []],
}
CHOICES = """
import json, pathlib, sys
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *args, **kwargs: (
    sys.argv[1] if str(path) == "/proc/cpuinfo" else read(path, *args, **kwargs)
)
from hf_llmarch.integrations import processors
print(json.dumps([[str(dtype) for dtype in dtypes] for dtypes in (processors.BY_ONEDNN, processors.WEIGHT_FIRST)]))
"""


@needs_onednn
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems describe a processor otherwise")
@pytest.mark.parametrize("processor", PROCESSORS, ids=["amx", "intel", "amd"])
def test_the_choice_follows_the_processor(processor: str) -> None:
    ran = subprocess.run([sys.executable, "-c", CHOICES, processor], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == PROCESSORS[processor]


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
    """A linear map's derivative in a direction is its value there."""
    with torch.autograd.forward_ad.dual_level():
        out = module(torch.autograd.forward_ad.make_dual(torch.zeros_like(x), x))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def traced(module: Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.trace(module, (x[:2],), check_trace=False)(x)


def compiled(module: Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(module, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("watcher", [under_autocast, counting_flops, mapped, forward_gradient, traced, compiled])
def test_torch_s_own_product_where_it_is_watched(
    watcher: Callable[[Linear, torch.Tensor], torch.Tensor], product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch_s_own_noted(monkeypatch)
    module, x = layer(bias=False), torch.randn(3, 40)
    with torch.no_grad():
        module(x)
        assert not own
        got = watcher(module, x)
    assert own
    assert got.dtype == (torch.bfloat16 if watcher is under_autocast else torch.float32)
    assert_close(got, exact(module, x), "bf16" if watcher is under_autocast else "native")


def test_gradients_are_torch_s_own(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch_s_own_noted(monkeypatch)
    module, x = layer(bias=False), torch.randn(3, 40, requires_grad=True)
    module(x).sum().backward()
    assert len(own) == 1
    assert_close(x.grad, module.weight.detach().sum(0).expand(3, 40), "native")


# -- prepacked weights -----------------------------------------------------------------------------------------------

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
    monkeypatch.setattr(processors, "AMX", False)
    monkeypatch.setattr(processors, "WEIGHT_FIRST", set())
    return onednn_noted(monkeypatch)


def copies(model: nn.Module) -> list[Any]:
    return [m.prepacked for m in model.modules() if isinstance(m, Linear) and m.prepacked is not None]


@needs_onednn
@pytest.mark.parametrize("kind", KINDS)
def test_prepacked_weights_serve_few_rows(kind: str, packs: list[torch.Tensor]) -> None:
    model = tiny_model(**KINDS[kind]).to(torch.bfloat16)
    many, one = text(batch=3, length=11), text(batch=1, length=1)
    with torch.no_grad():
        expected = [model(ids).logits for ids in (many, one)]
        assert not in_onednn_layout(packs)
        with prepacked(model):
            assert_close(model(many).logits, expected[0], "bf16")
            packs.clear()
            assert_close(model(one).logits, expected[1], "bf16")
            linears = 3 * (4 + (3 if kind == "dense" else 0)) + 1  # three layers, four of attention, and the head
            experts = 3 * 2 * 3 if kind == "linear experts" else 0
            assert in_onednn_layout(packs) == linears + experts
        assert not copies(model)


@needs_onednn
def test_generate_prepacks_for_a_long_text(monkeypatch: pytest.MonkeyPatch, packs: list[torch.Tensor]) -> None:
    model, ids = tiny_model().to(torch.bfloat16), text(batch=1, length=5)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=generation.STEPS_UNPREPARED, **settings)
    assert not in_onednn_layout(packs)
    long = model.generate(ids, max_new_tokens=20, **settings)
    products = 3 * 7 + 1
    assert in_onednn_layout(packs) == (20 - generation.STEPS_UNPREPARED) * products
    assert not copies(model)
    packs.clear()
    monkeypatch.setattr(processors, "free_memory", lambda: 0)  # no room for a copy
    assert model.generate(ids, max_new_tokens=20, **settings).equal(long)
    assert not in_onednn_layout(packs)


@needs_onednn
def test_copies_end_with_an_error(packs: list[torch.Tensor]) -> None:
    model = tiny_model().to(torch.bfloat16)

    def stop() -> None:
        assert copies(model)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), prepacked(model):
        stop()
    assert not copies(model)


def test_fp32_is_not_prepacked(packs: list[torch.Tensor]) -> None:
    model = tiny_model()
    with prepacked(model):
        assert not copies(model)


@needs_onednn
def test_nothing_is_prepacked_for_amx(monkeypatch: pytest.MonkeyPatch, packs: list[torch.Tensor]) -> None:
    monkeypatch.setattr(processors, "AMX", True)
    model = tiny_model().to(torch.bfloat16)
    with prepacked(model):
        assert not copies(model)


def test_a_linear_is_copied_and_pickled() -> None:
    module, x = layer(), torch.randn(3, 40)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(twin, nn.Linear)
        assert twin(x).equal(module(x))
