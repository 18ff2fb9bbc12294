"""The kernels of experts against float64: every row of the route table, one token, some, and many."""

import pytest
from kernel_cases import FULL_CAPS, covers
from reference import assert_close

from llamagpu.engine import routes
from llamagpu.engine.routes import Inputs
from llamagpu.files.architectures import Activation
from llamagpu.files.storage import Storage
from llamagpu.verify import expert_kernels as experts
from llamagpu.verify.reference import COPIED, F32, REQUANTISED, Weight, fits

WEIGHTS = (
    experts.WEIGHT,
    experts.RAGGED,
    Weight(Storage.Q8, 7, 1056),  # odd n; a last block that few lanes have
    Weight(Storage.Q6, 10, 64, 16, scale_bits=32),
)
TOKENS = (1, 3, 20)
LINEAR = [
    pytest.param(route, weight, inputs, id=f"{route.kernel}-{weight.name}-{inputs}-{i}")
    for i, route in enumerate(routes.EXPERT_LINEAR)
    for weight in WEIGHTS
    for inputs in (Inputs.F32, Inputs.INT8)
    if any(fits(route, experts.shape_of(weight, inputs, m), FULL_CAPS) for m in TOKENS)
    and (inputs is Inputs.F32 or weight in WEIGHTS[:1])
]
INT8_RESULTS = [route for route in routes.EXPERT_LINEAR if "int8 results" in route.needs]


@covers(*(route.kernel for route in routes.EXPERT_LINEAR))
@pytest.mark.parametrize("route, weight, inputs", LINEAR)
def test_expert_linear(gpu, route, weight, inputs):
    for m in TOKENS:
        if fits(route, experts.shape_of(weight, inputs, m), gpu.caps):
            for own_inputs in (False, True):
                got, want = experts.linear(gpu, route, weight, inputs, m, own_inputs)
                assert_close(got, want, *F32, f"{m} rows, own_inputs={own_inputs}")


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("route", INT8_RESULTS, ids=lambda route: str(route.consts["WORKGROUP"]))
def test_int8_results(gpu, route, activation):
    if route.consts["WORKGROUP"] > gpu.caps.invocations:
        pytest.skip("the adapter has smaller workgroups")
    assert_close(*experts.hidden(gpu, route, 3, activation), *REQUANTISED)


@covers("top_experts")
@pytest.mark.parametrize("shape", [(6, 3), (130, 8), (1, 1), (257, 16)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_top_experts(any_gpu, shape, whole):
    got, want = experts.top(any_gpu, *shape, whole, 5)
    assert (got[..., 0] == want[..., 0]).all()
    assert_close(got[..., 1], want[..., 1], *F32)


@covers("group_experts", "sum_experts")
def test_groups_and_sums(any_gpu):
    for m in (1, 9, 20, 70):
        assert_close(*experts.group(any_gpu, m), 0.0, 0.0, f"{m} rows")
    for m in (1, 5):
        assert_close(*experts.total(any_gpu, 129, m), *COPIED, f"{m} rows")
