"""Every kernel has a test, and every row of the route tables has cases."""

import test_kernels_attention as attention
import test_kernels_bench as bench
import test_kernels_conv as conv
import test_kernels_embed as embed
import test_kernels_experts as experts
import test_kernels_linear as linear
import test_kernels_norm as norm
import test_kernels_sample as sample
import test_kernels_texture as texture
from kernel_cases import COVERED

from llamagpu.engine import routes
from llamagpu.gpu import shaders

MODULES = (attention, bench, conv, embed, experts, linear, norm, sample, texture)  # importing them fills COVERED


def test_every_kernel_has_a_test():
    kernels = {name for name, path in shaders.kernel_files().items() if path.parent.name != "parts"}
    assert kernels == COVERED


def test_every_route_has_cases():
    lists = (linear.LINEAR, linear.LOGITS, linear.SWIGLU, norm.NORM, attention.ATTEND, attention.INT8, embed.EMBED)
    ran = {id(param.values[1]) for params in lists for param in params} | set(
        map(id, (*linear.F32_TILES, *linear.LARGE, *linear.MATRIX_TILES, *linear.SKINNY))
    )
    ran |= {id(param.values[0]) for param in (*experts.LINEAR, *attention.MATRIX)} | set(map(id, experts.INT8_RESULTS))
    for table in (routes.LINEAR, routes.EXPERT_LINEAR, routes.NORM, routes.NORM_BLOCKS, routes.ATTEND, routes.EMBED):
        assert not [route for route in table if id(route) not in ran]
