"""What benchmarks read off a compiled program."""

from benchmarks import hlo

PROGRAM = """HloModule jit_step

%fused (a: bf16[8,128], b: f32[4]) -> bf16[2,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %part = bf16[2,128]{1,0} slice(%a), slice={[0:2], [0:128]}
  ROOT %sum = bf16[2,128]{1,0} custom(%part, %b)
}

%stored (a: f32[64,16], b: f32[1,16], i: s32[]) -> f32[64,16] {
  %a = f32[64,16]{1,0} parameter(0)
  %b = f32[1,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %all = f32[64,16]{1,0} dynamic-update-slice(%a, %b, %i, %i)
}

%inner (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  ROOT %copied = f32[16]{0} copy(%x)
}

ENTRY %main (p: bf16[8,128], q: f32[4], r: f32[64,16], s: f32[1,16], i: s32[], v: f32[16]) -> f32[64,16] {
  %p = bf16[8,128]{1,0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %r = f32[64,16]{1,0} parameter(2)
  %s = f32[1,16]{1,0} parameter(3)
  %i = s32[] parameter(4)
  %v = f32[16]{0} parameter(5)
  %loop_fusion = bf16[2,128]{1,0} fusion(%p, %q), kind=kLoop, calls=%fused
  %gemm_fusion_dot = bf16[2,128]{1,0} fusion(%loop_fusion), kind=kCustom, calls=%product
  %kernel = (f32[4]{0}, s8[999]{0}) custom-call(%q, %q, %q, %q, /*index=4*/%v), custom_call_target="triton_kernel_call"
  %same = f32[16]{0} bitcast(%v)
  %in_place = f32[64,16]{1,0} fusion(%r, %s, %i), kind=kLoop, calls=%stored
  %called = f32[16]{0} call(%v), to_apply=%inner
  ROOT %either = f32[16]{0} conditional(%i, %v, %v), branch_computations={%inner, %inner}
}

%product (a: bf16[2,128]) -> bf16[2,128] {
  %a = bf16[2,128]{1,0} parameter(0)
  ROOT %dot = bf16[2,128]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}
"""


def test_launches_and_their_bytes():
    assert list(hlo.launches(PROGRAM)) == [
        ("fusion", "loop_fusion", 512 + 16 + 512),  # a slice of the first operand
        ("matmul", "gemm_fusion_dot", 512 + 512),
        ("triton_kernel_call", "kernel", 4 * 16 + 64 + 16),
        ("fusion", "in_place", 64 + 4 + 64),
        ("copy", "copied", 128),
        ("copy", "copied", 128),
        ("copy", "copied", 128),
    ]
