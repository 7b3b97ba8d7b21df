"""A program that prints digests of what kernels compute in Triton's interpreter: with the argument "faster", faster.

The kernels take most ways there are through a recording. Each is launched several times, with other values.
"""

import hashlib
import sys

import torch
import triton
import triton.language as tl

LANES = 16
TWO = tl.constexpr(2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.float32, torch.float64)


@triton.jit
def put(out, place, value):
    """A function without a result."""
    tl.store(out + place * value.shape[0] + tl.arange(0, value.shape[0]), value.to(tl.float64))


@triton.jit
def ordered(first, second, up):
    """A function of two results, with a branch by what an argument holds."""
    if up:
        first = first + 1
    return tl.minimum(first, second), tl.maximum(first, second)


@triton.jit
def twice(value):
    return TWO * value


@triton.jit
def arithmetic(out, a, b, lanes: tl.constexpr):
    """Promotions, constants, comparisons and casts."""
    lane = tl.program_id(0) * lanes + tl.arange(0, lanes)
    x, y = tl.load(a + lane), tl.load(b + lane)
    out += tl.program_id(0) * 8 * lanes
    put(out, 0, x + y)
    put(out, 1, (x - y) * 3)
    put(out, 2, x * y)
    put(out, 3, tl.where(x > y, x, y * 2.5))
    put(out, 4, x.to(tl.float32) / tl.where(y == 0, 1, y) + 0.5)
    least, most = ordered(x, y, tl.program_id(0))
    put(out, 5, least.to(tl.float32) + tl.exp(-tl.abs(most.to(tl.float32))))
    put(out, 6, tl.cast(x, tl.bfloat16).to(tl.float32))
    put(out, 7, tl.sum(x.to(tl.float32), 0) + tl.max(y, 0) - tl.min(x, 0) + tl.zeros([lanes], tl.float32))


@triton.jit
def integers(out, a, b, lanes: tl.constexpr):
    """Overflows, divisions of negative numbers, shifts of both kinds, bits."""
    lane = tl.arange(0, lanes)
    x, y = tl.load(a + lane), tl.load(b + lane)
    put(out, 0, x % 7 + twice(x // 3))
    put(out, 1, ((x >> 1) ^ (y << 2)) | ~x)
    put(out, 2, tl.where((x > y) & (tl.load(a) > tl.load(b)), x & 15, x) * (y * 0 + 1) - y)
    put(out, 3, (x.to(tl.int64) << 40) >> 3)
    put(out, 4, x.to(tl.int32) * 1000003 + x.to(tl.int32) * -77777)
    put(out, 5, tl.cumsum((y & 1).to(tl.int32), 0) + tl.cdiv(lane, 3))
    put(out, 6, tl.full([lanes], 1, tl.int64) << (x & 31).to(tl.int64))
    put(out, 7, x.to(tl.uint32).to(tl.uint64) // 5 + TWO * tl.load(a).to(tl.int32))


@triton.jit
def course(out, a, times, scale, lanes: tl.constexpr):
    """Loops to arguments and to what was loaded, branches, masks of single values, counters, noise."""
    lane = tl.arange(0, lanes)
    value = tl.load(a + lane).to(tl.float32)
    for step in range(times):
        value = value + step * scale
    put(out, 0, value)
    end = tl.load(a).to(tl.int32) & 7
    while end > 0:
        value = tl.where(lane < end, value, -value)
        end -= 2
    put(out, 1, value)
    if tl.load(a + 1) > 0:
        put(out, 2, value + 1)
    single = tl.load(a + 2, mask=times > 2, other=5)
    tl.store(out + 3 * lanes + tl.atomic_add(out + 4 * lanes, 1.0).to(tl.int32), single.to(tl.float64), mask=times > 1)
    put(out, 5, tl.rand(times, lane))
    best, place = tl.max(value, 0, return_indices=True)
    put(out, 6, tl.where(lane == place, best, tl.argmin(value, 0)))
    square = (value[:, None] * value[None, :]).to(tl.float32)
    put(out, 7, tl.sum(tl.trans(square) - 2 * square, 1) + tl.sum(tl.dot(square, square), 0))


def values(kind: torch.dtype, seed: int) -> torch.Tensor:
    """All of a dtype's range."""
    random = torch.Generator().manual_seed(seed)
    if kind.is_floating_point:
        return (8 * torch.randn(2 * LANES, generator=random)).to(kind)
    of = torch.iinfo(kind)
    return torch.randint(of.min, of.max, (2 * LANES,), generator=random, dtype=kind)


def main() -> None:
    """Digests, a line for each kernel and dtype."""
    if "faster" in sys.argv:
        import faster_interpreter

        faster_interpreter.make_faster()
    for kind in INTEGERS + FLOATS:
        for other in INTEGERS + FLOATS:
            if kind.is_floating_point or other.is_floating_point or kind.is_signed == other.is_signed:
                show(arithmetic, kind, other, lambda seed, out, *of: arithmetic[(2,)](out, *of, LANES))
    for kind in (kind for kind in INTEGERS if kind.is_signed):  # the interpreter has no complement of the others
        show(integers, kind, kind, lambda seed, out, *of: integers[(1,)](out, *of, LANES))
    for kind in (*INTEGERS, *FLOATS, torch.bfloat16):
        for times in (0, 1, 3, 7):
            show(course, kind, kind, lambda seed, out, a, b, n=times: course[(1,)](out, a, n, 0.5 + seed, LANES))


def show(kernel, kind: torch.dtype, other: torch.dtype, launch) -> None:
    """A line with the bits of what several launches computed."""
    digest, count = hashlib.sha256(), 0
    for seed in range(4):
        out = torch.zeros(2 * 8 * LANES, dtype=torch.float64)
        launch(seed, out, values(kind, seed), values(other, seed + 9))
        digest.update(out.numpy().tobytes())
        count += int((out != 0).sum())
    print(kernel.__name__, kind, other, count, digest.hexdigest())


if __name__ == "__main__":
    main()
